"""Trains a team: python -m mars2_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command again goes on where the run stopped.
"""

from mars2_jax import command

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir()


def main() -> None:
    config = command.load(_CONFIG)
    from mars2_jax.training.trainer import train

    assert _WORKDIR.value is not None  # a required flag
    train(config, _WORKDIR.value)


if __name__ == "__main__":
    command.run(main)
