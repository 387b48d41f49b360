"""Trains a team: python -m mars2_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command again goes on where the run stopped. Several processes, on one machine or on many, train as one with
--coordinator_address, --num_processes and --process_id, or by themselves on a TPU slice or under SLURM; see launch/.
"""

from mars2_jax import command

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir()
_HOSTS = command.define_hosts()


def main() -> None:
    config = command.load(_CONFIG)
    from mars2_jax.parallel.hosts import Coordinates
    from mars2_jax.training.trainer import train

    given = {name: flag.value for name, flag in _HOSTS.items()}
    coordinates = Coordinates(detect=given.pop("distributed") == "auto", **given)
    assert _WORKDIR.value is not None  # a required flag
    train(config, _WORKDIR.value, coordinates=coordinates)


if __name__ == "__main__":
    command.run(main)
