"""Writes a model in Hugging Face layout, for `transformers` and vLLM. An agent of a training run:

    python -m mars2_jax.convert --config=configs/quickstart.py --workdir=runs/quickstart --agent=coder --out=coder

or any model that this program reads, such as a GGUF file:

    python -m mars2_jax.convert --model=model.gguf --out=model
"""

from absl import flags

from mars2_jax import command
from mars2_jax.errors import ConfigError

_CONFIG = command.define_config()
_WORKDIR = command.define_workdir(required=False)
_AGENT = flags.DEFINE_string("agent", None, "The agent of the run in --workdir whose weights are written.")
_STEP = command.define_step()
_MODEL = flags.DEFINE_string("model", None, "In place of a run: a model path, as in config.agents.<name>.model.path.")
_OUT = flags.DEFINE_string("out", None, "Folder to write, which must not hold anything.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Number type of the weights.")


def main() -> None:
    of_run = {"--config": _CONFIG.value, "--workdir": _WORKDIR.value, "--agent": _AGENT.value, "--step": _STEP.value}
    given = [flag for flag, value in of_run.items() if value is not None]
    if _MODEL.value is not None and given:
        raise ConfigError(f"--model and {given[0]} do not go together: give a model, or a run with its --agent")
    assert _OUT.value is not None  # a required flag
    if _MODEL.value is not None:
        from mars2_jax.training.export import export_model

        export_model(_MODEL.value, _OUT.value, dtype=_DTYPE.value)
    elif _WORKDIR.value is None or _AGENT.value is None:
        raise ConfigError("nothing to convert: give --model=PATH, or --config, --workdir and --agent of a run")
    else:
        config = command.load(_CONFIG)
        from mars2_jax.training.export import export_agent

        export_agent(config, _WORKDIR.value, _AGENT.value, _OUT.value, step=_STEP.value, dtype=_DTYPE.value)


if __name__ == "__main__":
    command.run(main)
