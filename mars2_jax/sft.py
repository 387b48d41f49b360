"""Fine-tunes agents on pairs of prompts and programs, before they train together:

    python -m mars2_jax.sft --config=configs/quickstart.py --workdir=runs/sft

`config.sft` says on what and how (mars2_jax/config.py). The same command again goes on where the run stopped. What an
agent has become is written as a model, which `config.agents.<name>.model.path` of a training run may name, by

    python -m mars2_jax.convert --config=configs/quickstart.py --workdir=runs/sft --agent=coder --out=coder
"""

from absl import flags

from mars2_jax import command

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir()
_AGENT = flags.DEFINE_string("agent", None, "The agent to fine-tune; by default one after the other, all that learn.")


def main() -> None:
    config = command.load(_CONFIG)
    from mars2_jax.training.sft import fine_tune

    assert _WORKDIR.value is not None  # a required flag
    fine_tune(config, _WORKDIR.value, _AGENT.value)


if __name__ == "__main__":
    command.run(main)
