"""The device mesh and the one table that says which logical axis of a weight lies on which mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mars2_jax.errors import ConfigError

__all__ = ["MESH_AXES", "RULES", "make_mesh", "param_shardings", "replicated", "rows"]

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, str | None] = {
    "embed": "fsdp",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Logical axis -> mesh axis. Rows of a batch lie on ("data", "fsdp")."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor`; one size may be -1 and takes the devices that are left.

    The axes are `Auto`: the compiler propagates shardings from the arguments. `jax.make_mesh` would make them
    `Explicit`, under which every gather from a sharded table must name its output's sharding.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes[axis] for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(n < 1 and n != -1 for n in shape):
        raise ConfigError(f"config.mesh {dict(sizes)}: sizes are positive, at most one of them -1")
    known = int(np.prod([n for n in shape if n != -1]))
    shape = [len(devices) // known if n == -1 else n for n in shape]
    if int(np.prod(shape)) != len(devices):
        raise ConfigError(f"config.mesh {dict(sizes)} does not cover {len(devices)} devices: make the product equal")
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def param_shardings(mesh: Mesh | AbstractMesh, params: nnx.State) -> nnx.State:
    """The sharding of every parameter, from its logical axes; the same tree as `params`, which may be abstract.

    An axis that the mesh axis does not divide is replicated (a table of 49,153 tokens over 2 devices, say).
    """

    def sharding(variable: nnx.Variable):
        axes = variable.get_metadata("axes", (None,) * len(variable.shape))
        spec = [RULES[a] if a is not None else None for a in axes]
        spec = [m if m is None or n % mesh.shape[m] == 0 else None for m, n in zip(spec, variable.shape, strict=True)]
        assert len([m for m in spec if m]) == len({m for m in spec if m}), f"axes {axes} collide on the mesh"
        return variable.replace(NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(sharding, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes; `leading` axes before the rows are replicated."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, ("data", "fsdp")))
