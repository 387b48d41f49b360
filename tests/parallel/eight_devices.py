"""Run with eight forced host devices: trains a tiny team one step on a mesh, goes on with a second run of the same
command (which finds itself finished), writes the state to state.npz, and prints how a weight is split.

python -m tests.parallel.eight_devices FOLDER WORKDIR DATA FSDP TENSOR
"""

import json
import pathlib
import sys

import jax
import numpy as np
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.training.setup import Setup
from mars2_jax.training.trainer import train
from tests.parallel.test_mesh import mesh_config, weights


def main() -> None:
    folder, workdir, *sizes = sys.argv[1:]
    data, fsdp, tensor = map(int, sizes)
    config = mesh_config(pathlib.Path(folder))
    config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
    frozen = FrozenConfigDict(config)
    for _ in range(2):
        train(frozen, workdir, Console(file=sys.stderr))
    np.savez(pathlib.Path(workdir) / "state.npz", **weights(workdir))
    team = Setup.check(frozen).team(learn=False)
    block = team[0].engine.params["blocks"][0]
    shards = {}
    for name, weight in (("qkv", block["attention"]["qkv"]), ("up", block["mlp"]["up"])):
        array = weight[...]
        shards[name] = [list(array.shape), list(array.addressable_shards[0].data.shape)]
    print(json.dumps({"devices": jax.device_count(), "shards": shards}))


if __name__ == "__main__":
    main()
