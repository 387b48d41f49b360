"""The device mesh, and the one table that says which logical axis of an array lies on which mesh axis.

Weights and activations name their axes ("embed", "rows", ...); where those lie is decided here and nowhere else. The
mesh is in context: a command enters `jax.set_mesh(mesh)` once, and `constrain` and the attention kernels ask for it.
Engines, which may have a mesh of their own over the same devices, enter that for each of their calls.

Of several processes (see `parallel.hosts`) the mesh of the training has the devices of all, those of a process side by
side, and each engine's those of its own process.
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
    "hosts_mesh",
    "local_mesh",
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
      devices: None are all there are, of all processes.
      key: where `sizes` comes from, for the message.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    if devices is None:
        # Processes lie along the outer axes: what tensor parts exchange in every layer stays within one.
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    devices = list(devices)
    shape = [sizes[axis] for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(n < 1 and n != -1 for n in shape):
        raise ConfigError(f"config.{key} {dict(sizes)}: sizes are positive, at most one of them -1")
    known = int(np.prod([n for n in shape if n != -1]))
    shape = [len(devices) // known if n == -1 else n for n in shape]
    if int(np.prod(shape)) != len(devices):
        raise ConfigError(f"config.{key} {dict(sizes)} does not cover {len(devices)} devices: make the product equal")
    return _mesh(np.asarray(devices).reshape(shape), MESH_AXES)


def _mesh(devices: np.ndarray, axes: Sequence[str]) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def rollout_mesh(sizes: Mapping[str, int], training: Mesh) -> Mesh:
    """The mesh on which engines decode: of the training's devices that belong to this process, in the same order. Where
    all sizes are 0, its part of the training's mesh: with one process, that mesh itself.

    Raises:
      ConfigError: as `make_mesh`; or the sizes are 0 and the part of a process is no mesh.
    """
    own = jax.process_count() > 1
    if not any(sizes.values()):
        return local_mesh(training) if own else training
    devices = [d for d in training.devices.flat if not own or d.process_index == jax.process_index()]
    return make_mesh(sizes, devices, key="rollout.mesh")


def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh of all processes that lies on this one.

    Raises:
      ConfigError: some process's devices are no block of the mesh, or of another shape than this one's.
    """
    owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    parts = {}
    for process in range(jax.process_count()):
        places = np.argwhere(owner == process)
        low, high = places.min(0), places.max(0) + 1
        parts[process] = mesh.devices[tuple(slice(*ends) for ends in zip(low, high, strict=True))]
        if parts[process].size != len(places) or parts[process].shape != parts[0].shape:
            raise ConfigError(
                f"config.rollout.mesh is all zeros, but of config.mesh {dict(mesh.shape)} process {process} of "
                f"{jax.process_count()} has no part that is a mesh like those of the others: set config.rollout.mesh, "
                f"for the {len(places)} devices of a process"
            )
    return _mesh(parts[jax.process_index()], MESH_AXES)


def hosts_mesh(local: Mesh, training: Mesh) -> Mesh:
    """The meshes `local` of all processes as one, with the axis "hosts" before the others, over the devices of
    `training` in their order: what is not split over "hosts" is what each process would have alone."""
    devices = list(training.devices.flat)
    count = len(devices) // local.size
    if [d.process_index for d in devices] != [i for i in range(count) for _ in range(local.size)]:
        raise ValueError("the devices of a process must lie side by side in the mesh, see make_mesh")
    return _mesh(np.asarray(devices).reshape(count, *local.devices.shape), ("hosts", *MESH_AXES))


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
