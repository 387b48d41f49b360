"""Trains a team: python -m mars2_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command again goes on where the run stopped. Several processes, on one machine or on many, train as one with
--coordinator_address, --num_processes and --process_id, or by themselves on a TPU slice or under SLURM; see launch/.
"""

from absl import flags

from mars2_jax import command

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir()
_HOSTS = command.define_hosts()
_STOPPED_CODE = flags.DEFINE_integer(
    "stopped_code",
    0,
    "Exit code of a run that was asked to stop (SIGTERM) before it was done. A launcher that starts runs again gives "
    "another here, to tell these from those that are done.",
    lower_bound=0,
    upper_bound=255,
)


def main() -> int:
    config = command.load(_CONFIG)
    from mars2_jax.parallel.hosts import Coordinates
    from mars2_jax.training.trainer import train

    given = {name: flag.value for name, flag in _HOSTS.items()}
    coordinates = Coordinates(detect=given.pop("distributed") == "auto", **given)
    assert _WORKDIR.value is not None  # a required flag
    done = train(config, _WORKDIR.value, coordinates=coordinates)
    return 0 if done else _STOPPED_CODE.value


if __name__ == "__main__":
    command.run(main)
