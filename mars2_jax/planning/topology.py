"""Devices of a TPU topology that is not there, for the compiler to compile for."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax

from mars2_jax.errors import PlanError
from mars2_jax.planning.chips import CHIPS, Chip

__all__ = ["topology_devices"]

# libtpu asks the cloud's metadata server which machine it is on, and complains when nobody answers. What it is told
# here has no influence on the topology that it is asked for.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    # It lets one process use the TPUs of a machine. This one uses none.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_AXES = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}

_CHIPS_PER_HOST = 4


def topology_devices(name: str) -> tuple[Chip, Sequence[jax.Device]]:
    """The chip and the devices, one a chip, of a topology such as "v5p:4x4x4". They compile and do not run.

    Needs libtpu and no TPU; the process should not look for one (JAX_PLATFORMS=cpu).

    Raises:
      PlanError: no libtpu, or no such topology.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if match is None or match[1] not in CHIPS:
        raise PlanError(
            f"--topology={name} is unknown: write <chip>:<shape>, such as v5e:4x4 or v5p:4x4x4; the chips are "
            f"{', '.join(CHIPS)}"
        )
    kind, shape = match[1], [int(size) for size in match[2].split("x")]
    if len(shape) != _AXES[kind]:
        raise PlanError(
            f"--topology={name} is unknown: the shape of a {kind} has {_AXES[kind]} sizes, as in "
            f"{kind}:{'x'.join('4' * _AXES[kind])}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError("libtpu, the TPU compiler, is not installed: pip install 'mars2_jax[tpu]'")
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # Loaded late: the library reads the environment when it is loaded.
    from jax.experimental import topologies

    options: dict[str, object] = {}
    if math.prod(shape) < _CHIPS_PER_HOST:
        options["chips_per_host_bounds"] = (*shape, 1, 1)[:3]
    if kind == "v4":
        # Both cores of a chip as one device, as JAX drives them; without it, two devices a chip.
        options["chip_config_name"] = "megacore"
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as e:
        raise PlanError(f"--topology={name} is unknown to libtpu: {str(e).splitlines()[0]}") from e
    return CHIPS[kind], devices
