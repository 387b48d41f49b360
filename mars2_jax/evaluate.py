"""Evaluates a team: python -m mars2_jax.evaluate --config=configs/quickstart.py --config.eval.source=human_eval

With --workdir=DIR it is the newest checkpoint of that training run (or that of --step=N, or --step=best), else the
models as they come.
"""

from mars2_jax import command

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir(required=False)
_STEP = command.define_step()


def main() -> None:
    config = command.load(_CONFIG)
    from mars2_jax.training.evaluation import run_evaluation

    run_evaluation(config, _WORKDIR.value, step=_STEP.value)


if __name__ == "__main__":
    command.run(main)
