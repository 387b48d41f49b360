"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen weight W acts as W + (alpha / rank) · B A.

Ours, because `qwix.apply_lora_to_model` (0.1.8) does not fit this decoder: weights that are reshaped before their
matmul get no adapter, the others one with the logical axes of the whole weight; it intercepts one method, and the
engine calls another; and every call makes a new class, so that no two agents would share a compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.parallel.exchange import put

__all__ = ["Adapter", "Lora", "adapter", "fresh_adapters", "learned", "merge_lora"]

_SUFFIX = "_lora"
"""The adapter of the weight `qkv` is the attribute `qkv_lora`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which weights of every layer have adapters, and of what rank.

    Attributes:
      rank: rank of B A, at least 1.
      alpha: B A counts `alpha / rank` times.
      targets: "attention", the fused query, key and value weight and the output weight; "mlp", the gate, up and down
        weights. Queries, keys and values share one A, as they share one matmul.
    """

    rank: int
    alpha: float
    targets: frozenset[str]

    @classmethod
    def from_config(cls, config: ConfigDict | FrozenConfigDict) -> Lora | None:
        """From the section `model.lora` of an agent; None where its rank is 0."""
        return cls(config.rank, float(config.alpha), frozenset(config.targets)) if config.rank else None

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


class Adapter(nnx.Module):
    """(alpha / rank) · B A, beside a weight [*outputs, *inputs].

    A is uniform in ±1/√(number of inputs), as in the authors' code; B is zero, so that an adapter starts as no change
    at all. Both have the logical axes of the sides of the weight that they touch; the rank is not sharded.

    Args:
      weight: gives shapes, logical axes and type.
      inputs: how many of its last axes are contracted with x.
      lora: rank and scale.
      rngs: with a stream `lora`.
    """

    def __init__(self, weight: nnx.Param, inputs: int, lora: Lora, rngs: nnx.Rngs):
        cut = weight.ndim - inputs
        axes = weight.get_metadata("axes")
        a, b = (lora.rank, *weight.shape[cut:]), (*weight.shape[:cut], lora.rank)
        self.a = nnx.LoRAParam(_start_a(rngs.lora(), a, weight.dtype), axes=(None, *axes[cut:]))
        self.b = nnx.LoRAParam(jnp.zeros(b, weight.dtype), axes=(*axes[:cut], None))
        self.scale = lora.scale

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """What it adds to the weight's product with x. Both matmuls are of the rank's size; B A is never formed."""
        a = self.a[...].reshape(self.a.shape[0], -1).astype(x.dtype)
        b = self.b[...].reshape(-1, self.b.shape[-1]).astype(x.dtype)
        return jnp.einsum("...r,or->...o", self.scale * jnp.einsum("...i,ri->...r", x, a), b)


def _start_a(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bound = math.prod(shape[1:]) ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def adapter(lora: Lora | None, target: str, weight: nnx.Param, inputs: int, rngs: nnx.Rngs) -> Adapter | None:
    """The adapter of a weight of the group `target`, see `Adapter`; None where `lora` gives that group none."""
    return Adapter(weight, inputs, lora, rngs) if lora is not None and target in lora.targets else None


def fresh_adapters(abstract: nnx.State, key: Key[Array, ""], shardings: nnx.State) -> nnx.State:
    """Adapters that change nothing yet, in float32.

    As `Adapter` makes them, but one by one: those of a shape share a small program, while one for all layers would be
    slow to compile.

    Args:
      abstract: shapes of a decoder's adapters.
      key: they are a function of it alone, whatever the mesh.
      shardings: where they lie, a tree like `abstract`.
    """
    place = dict(nnx.to_flat_state(shardings))
    made = []
    for index, (path, variable) in enumerate(nnx.to_flat_state(abstract)):
        if path[-1] == "a":
            value = np.asarray(_start_a(jax.random.fold_in(key, index), variable.shape, jnp.float32))
        else:
            value = np.zeros(variable.shape, np.float32)
        made.append((path, variable.replace(put(value, place[path].get_value()))))
    return nnx.from_flat_state(made)


def learned(lora: Lora | None) -> type[nnx.Variable]:
    """The kind of a decoder's variables that training changes: adapters where there are any, else all weights."""
    return nnx.Param if lora is None else nnx.LoRAParam


def merge_lora(params: nnx.State, lora: Lora) -> nnx.State:
    """The weights of the plain decoder that computes what an adapted one does.

    Args:
      params: weights and adapters of a decoder made with `lora`.
      lora: the same.

    Returns:
      W + (alpha / rank) · B A where there is an adapter, W elsewhere, in float32: a state for a decoder without `lora`.
    """
    flat: dict[tuple[Any, ...], nnx.Variable] = dict(nnx.to_flat_state(params))
    merged = []
    for path, weight in flat.items():
        if isinstance(weight, nnx.LoRAParam):
            continue
        value = weight[...].astype(jnp.float32)
        beside = (*path[:-1], f"{path[-1]}{_SUFFIX}")
        if (*beside, "a") in flat:
            a, b = (flat[*beside, name][...].astype(jnp.float32) for name in "ab")
            value = value + lora.scale * jnp.tensordot(b, a, axes=1, precision="highest")
        merged.append((path, weight.replace(value)))
    return nnx.from_flat_state(merged)
