"""Run with eight forced host devices: trains a tiny team one step on a mesh; prints how a weight is split.

python -m tests.parallel.eight_devices FOLDER WORKDIR DATA FSDP TENSOR
"""

import json
import pathlib
import sys

import jax
from ml_collections import FrozenConfigDict
from rich.console import Console

from mars2_jax.training.setup import Setup
from mars2_jax.training.trainer import train
from tests.parallel.test_mesh import mesh_config


def main() -> None:
    folder, workdir, *sizes = sys.argv[1:]
    data, fsdp, tensor = map(int, sizes)
    config = mesh_config(pathlib.Path(folder))
    config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
    frozen = FrozenConfigDict(config)
    train(frozen, workdir, Console(file=sys.stderr))
    team = Setup.check(frozen).team(learn=False)
    block = team[0].engine.params["blocks"][0]
    shards = {}
    for name, weight in (("qkv", block["attention"]["qkv"]), ("up", block["mlp"]["up"])):
        array = weight[...]
        shards[name] = [list(array.shape), list(array.addressable_shards[0].data.shape)]
    print(json.dumps({"devices": jax.device_count(), "shards": shards}))


if __name__ == "__main__":
    main()
