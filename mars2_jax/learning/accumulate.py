"""The gradient of a batch that is cut into micro-batches: a sum over those that are filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

__all__ = ["sum_gradients"]


def sum_gradients(
    loss: Callable[..., tuple[Float[Array, ""], Any]],
    params: nnx.State,
    micro_batches: tuple[Any, ...],
    filled: Int[Array, ""] | None,
) -> tuple[nnx.State, Any]:
    """Σ ∇ loss over the micro-batches, one after the other, in the type of `params`.

    A loss that is a numerator whose denominator is summed beside it (in what it returns) gives a gradient that does not
    depend on how the batch was cut: Σ gradients / Σ denominators.

    Args:
      loss: of one micro-batch, (params, *micro-batch) -> (numerator, anything).
      params: what is differentiated.
      micro_batches: arguments of the loss, arrays with a leading axis of micro-batches.
      filled: how many of them hold something; what the others would have returned is 0. None: all.

    Returns:
      The sum of the gradients; what the loss returned beside the numerators, with an axis of micro-batches.
    """

    def body(total, micro):
        gradient, aux = jax.grad(loss, has_aux=True)(params, *micro)
        return jax.tree.map(jnp.add, total, gradient), aux

    zeros = jax.tree.map(jnp.zeros_like, params)
    if filled is None:
        return jax.lax.scan(body, zeros, micro_batches)
    one = lambda i: jax.tree.map(lambda x: x[i], micro_batches)
    count = jax.tree.leaves(micro_batches)[0].shape[0]
    outputs = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), jax.eval_shape(body, zeros, one(0))[1])

    def step(i: Int[Array, ""], carry: Any) -> Any:
        total, outputs = carry
        total, output = body(total, one(i))
        return total, jax.tree.map(lambda whole, x: whole.at[i].set(x), outputs, output)

    return jax.lax.fori_loop(0, filled, step, (zeros, outputs))
