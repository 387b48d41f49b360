"""Run with eight forced host devices: trains a tiny team one step on a mesh, goes on with a second run of the same
command (which finds itself finished), and writes the state to state.npz.

python -m tests.parallel.team_on_mesh FOLDER WORKDIR DATA FSDP TENSOR
"""

import pathlib
import sys

import numpy as np
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.training.trainer import train
from tests.parallel.test_mesh import mesh_config, weights


def main() -> None:
    folder, workdir, *sizes = sys.argv[1:]
    data, fsdp, tensor = map(int, sizes)
    config = mesh_config(pathlib.Path(folder))
    config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
    # Engines on another mesh of the same devices.
    config.rollout.mesh.update(data=-1, fsdp=1, tensor=tensor)
    frozen = FrozenConfigDict(config)
    for _ in range(2):
        train(frozen, workdir, Console(file=sys.stderr))
    np.savez(pathlib.Path(workdir) / "state.npz", **weights(workdir))


if __name__ == "__main__":
    main()
