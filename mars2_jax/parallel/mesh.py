"""The device mesh, and the one table that says which logical axis of an array lies on which mesh axis.

Weights and activations name their axes ("embed", "rows", ...); where those lie is decided here and nowhere else. The
mesh is in context: a command enters `jax.set_mesh(mesh)` once, and `constrain` and the attention kernels ask for it.
Engines, which may have a mesh of their own over the same devices, enter that for each of their calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

from mars2_jax.errors import ConfigError

__all__ = [
    "MESH_AXES",
    "RULES",
    "constrain",
    "make_mesh",
    "param_shardings",
    "partition_spec",
    "placed",
    "platform",
    "replicated",
    "rollout_mesh",
    "row_shards",
    "rows",
]

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, tuple[str, ...]] = {
    # Of weights. "embed" is the axis that FSDP stores in pieces and gathers for use.
    "embed": ("fsdp",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    # Of activations and caches; these also have kv_heads, mlp and vocab. Their embedding axis is never split: fsdp
    # already holds their rows.
    "rows": ("data", "fsdp"),
}
"""Logical axis -> the mesh axes that it is split over, outermost first."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None, *, key: str = "mesh") -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor`; one size may be -1 and takes the devices that are left.

    The axes are `Auto`: shardings are propagated by the compiler from the arguments and from `constrain`.
    `jax.make_mesh` would make them `Explicit`, where every gather from a sharded table, every reshape of a sharded axis
    and every `lax.while_loop` carry must be told its sharding: the rule table would be spread over the model again.

    Args:
      sizes: of the axes.
      devices: None are all there are.
      key: where `sizes` comes from, for the message.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes[axis] for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(n < 1 and n != -1 for n in shape):
        raise ConfigError(f"config.{key} {dict(sizes)}: sizes are positive, at most one of them -1")
    known = int(np.prod([n for n in shape if n != -1]))
    shape = [len(devices) // known if n == -1 else n for n in shape]
    if int(np.prod(shape)) != len(devices):
        raise ConfigError(f"config.{key} {dict(sizes)} does not cover {len(devices)} devices: make the product equal")
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def rollout_mesh(sizes: Mapping[str, int], training: Mesh) -> Mesh:
    """The mesh on which engines decode: of the training's devices, in the same order; that mesh itself where all sizes
    are 0.

    Raises:
      ConfigError: as `make_mesh`.
    """
    if not any(sizes.values()):
        return training
    return make_mesh(sizes, list(training.devices.flat), key="rollout.mesh")


def platform(where: Mesh | Sharding) -> str:
    """What devices are: "cpu", "cuda", "rocm" or "tpu". This process may run on something else and only compile for
    them."""
    device = where.devices.flat[0] if isinstance(where, Mesh) else next(iter(where.device_set))
    if device.platform == "gpu":
        return "rocm" if "rocm" in device.client.platform_version else "cuda"
    return device.platform


def partition_spec(
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str | None],
    shape: Sequence[int],
    rules: Mapping[str, tuple[str, ...]] = RULES,
) -> PartitionSpec:
    """Where an array lies, from the logical names of its axes.

    A mesh axis that does not divide the array's axis is left out: the array is replicated over it (a table of 49,153
    tokens over 2 devices, say). So is one of size 1, so that equal placements have equal specs: unequal ones compile
    anew.

    Args:
      mesh: the mesh.
      axes: a logical axis for each axis of the array; None is not split.
      shape: the array's shape.
      rules: logical axis -> mesh axes.

    Raises:
      ValueError: an axis that the rules do not know, or two axes of the array on one mesh axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
    spec: list[Any] = []
    owner: dict[str, str] = {}
    for name, size in zip(axes, shape, strict=True):
        if name is not None and name not in rules:
            raise ValueError(f"logical axis {name!r} is not in the rule table, which has {', '.join(rules)}")
        chosen: list[str] = []
        for axis in rules[name] if name is not None else ():
            # Whatever the sizes are: a mesh on which a bad rule does no harm must not hide it.
            if axis in owner:
                raise ValueError(
                    f"logical axes {owner[axis]!r} and {name!r} of one array {tuple(axes)} both lie on the mesh axis "
                    f"{axis!r}: change one of them in parallel.mesh.RULES"
                )
            owner[axis] = str(name)
            if mesh.shape[axis] > 1 and size % (math.prod(mesh.shape[a] for a in chosen) * mesh.shape[axis]) == 0:
                chosen.append(axis)
        spec.append(None if not chosen else chosen[0] if len(chosen) == 1 else tuple(chosen))
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def placed(mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with these logical axes, see `partition_spec`."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


def constrain(x: Shaped[Array, "..."], *axes: str | None) -> Shaped[Array, "..."]:
    """Fixes where an array inside a compiled program lies, by its logical axes; without a mesh in context, nothing.

    Example:
      x = constrain(x, "rows", None, None)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(mesh, axes, x.shape))


def param_shardings(mesh: Mesh | AbstractMesh, params: nnx.State) -> nnx.State:
    """The sharding of every parameter, from its logical axes; the same tree as `params`, which may be abstract.

    Raises:
      ValueError: see `partition_spec`.
    """

    def sharding(variable: nnx.Variable):
        axes = variable.get_metadata("axes", (None,) * len(variable.shape))
        return variable.replace(placed(mesh, axes, variable.shape))

    return jax.tree.map(sharding, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in RULES["rows"])


def rows(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows of a batch, which `row_shards` divides; `leading` axes before the rows are replicated."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, RULES["rows"]))
