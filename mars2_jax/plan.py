"""Says whether a run fits a TPU topology, with no TPU present: compiles all that the run would compile.

python -m mars2_jax.plan --config=configs/mars2_8b.py --topology=v5p:4x4x4

Exit code 0 if it fits, 1 if not. Needs libtpu, the TPU compiler: pip install 'mars2_jax[tpu]'
"""

import os
import sys

from absl import flags

from mars2_jax import command

_CONFIG = command.define_config()
_TOPOLOGY = flags.DEFINE_string("topology", None, "Chips to plan for, such as v5e:4x4 or v5p:4x4x4.", required=True)
_JSON = flags.DEFINE_string("json", None, "File to write the plan to, as JSON.")


def main() -> None:
    # Nothing here may take a device that is there.
    os.environ["JAX_PLATFORMS"] = "cpu"
    config = command.load(_CONFIG)
    from mars2_jax.planning.plan import make_plan

    assert _TOPOLOGY.value is not None  # a required flag
    if not make_plan(config, _TOPOLOGY.value, _JSON.value).fits:
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)
