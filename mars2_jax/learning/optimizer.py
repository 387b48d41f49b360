"""The optimizer of an agent, from its section of the config, and where its state lies on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict
from optax import contrib

from mars2_jax.errors import ConfigError

__all__ = ["HOST_MEMORY", "in_host_memory", "learning_rate", "make_optimizer", "state_shardings"]


HOST_MEMORY = "pinned_host"
"""JAX's name of the memory that offloaded arrays lie in: the host's, where devices can read it by themselves."""


def learning_rate(config: ConfigDict, count: Int[Array, ""]) -> Float[Array, ""]:
    """The learning rate of update number `count`, from 0.

    A warm-up of w updates is linear, `learning_rate · (count + 1) / w`, so that no update is lost at rate 0. After it
    the rate stays (`constant`), or goes within `decay_updates` updates to `final_learning_rate`, where it stays: in a
    line (`linear`) or half a cosine (arXiv 1608.03983, eq. 5).

    Raises:
      ConfigError: unknown schedule.
    """
    warm = jnp.minimum((count + 1) / max(config.warmup_updates, 1), 1.0)
    if config.schedule == "constant":
        return config.learning_rate * warm
    gone = jnp.clip((count - config.warmup_updates) / config.decay_updates, 0.0, 1.0)
    if config.schedule == "linear":
        left = 1 - gone
    elif config.schedule == "cosine":
        left = 0.5 * (1 + jnp.cos(jnp.pi * gone))
    else:
        raise ConfigError(f"optimizer.schedule={config.schedule!r} is unknown; use 'constant', 'cosine' or 'linear'")
    final = config.final_learning_rate
    return warm * (final + (config.learning_rate - final) * left)


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path)


def _decayed(params: nnx.State) -> Any:
    """Which weights decay: matrices. A bias may have several axes, so its name decides."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim >= 2 and "bias" not in _named(path), params)


# Axes that are contracted with the activations, and those of the outputs, of the layers' weights and of the two sides
# of their adapters; see `models.decoder` for the shapes. Axes that are neither are matrices of their own: queries, keys
# and values of each head, which only lie in one array.
_MATRICES = {
    "qkv": ((3,), (2,)),
    "out": ((1, 2, 3), (0,)),
    "gate": ((1,), (0,)),
    "up": ((1,), (0,)),
    "down": ((1,), (0,)),
}


def _matrix(path: Any, x: Any) -> contrib.MuonDimensionNumbers | None:
    """Which axes of a weight Muon takes for a matrix; None for norms, biases, embedding and head, which are AdamW's."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    names = [name for name in names if name and name != "value"]
    last = names[-1]
    if last in _MATRICES:
        return contrib.MuonDimensionNumbers(*_MATRICES[last])
    if last in ("a", "b") and len(names) > 1 and names[-2].endswith("_lora"):
        # [rank, *inputs] and [*outputs, rank].
        split = 1 if last == "a" else x.ndim - 1
        return contrib.MuonDimensionNumbers(tuple(range(split, x.ndim)), tuple(range(split)))
    return None


def _muon(config: ConfigDict) -> optax.GradientTransformation:
    """Without the learning rate, and with the sign of a descent."""
    muon = contrib.muon(
        1.0,
        beta=config.momentum,
        eps=config.eps,
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(_matrix, params),
        consistent_rms=0.2,
    )
    return optax.chain(muon, optax.add_decayed_weights(-config.weight_decay, mask=_decayed))


def _adafactor(config: ConfigDict) -> optax.GradientTransformation:
    """`optax.adafactor` without scaling by the weights' size, and with weight decay times the learning rate."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        optax.scale(-1.0),
    )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clipping, then the optimizer that the config names, at the rate of `learning_rate`.

    - `adamw` (arXiv 1711.05101).
    - `adafactor` (arXiv 1804.04235): second moments of a matrix as those of its rows and its columns, no first
      moments: next to no memory. Steps are not scaled by the size of the weights.
    - `muon` (arXiv 2502.16982): orthogonalised momentum for the matrices of the layers, Nesterov AdamW for embedding,
      head, norms and biases. Queries, keys and values of every head are matrices of their own. Steps are scaled to the
      size of AdamW's (eq. 4 there), so that one learning rate serves both.

    All three step by about the learning rate, whatever the size of the gradient. Weight decay is times the learning
    rate, and of matrices only, not of norms and biases.

    Args:
      config: the `optimizer` section of an agent.

    Raises:
      ConfigError: unknown name or schedule.
    """

    def rate(count: Int[Array, ""]) -> Float[Array, ""]:
        return learning_rate(config, count)

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    if config.name == "adamw":
        adamw = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        )
        return optax.chain(clip, adamw)
    if config.name not in ("adafactor", "muon"):
        raise ConfigError(f"optimizer.name={config.name!r} is unknown; use 'adamw', 'adafactor' or 'muon'")
    direction = _muon(config) if config.name == "muon" else _adafactor(config)
    return optax.chain(clip, direction, optax.scale_by_schedule(rate))


def state_shardings(params: nnx.State, state: Any) -> Any:
    """Where each array of an optimizer's state, or of something around it, lies: a tree like `state`.

    Moments lie beside their weights. A moment without one of the weight's axes (Adafactor's) is split over the axes
    that it has, or lies whole on every device where the weight has two axes that it might be. So do counts.

    Args:
      params: weights with shardings, arrays or abstract.
      state: arrays or shapes; what belongs to a weight has the weight's path at the end of its own.
    """
    weights = {_named(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    whole = next(iter(weights.values())).sharding
    if isinstance(whole, NamedSharding):
        whole = NamedSharding(whole.mesh, PartitionSpec())

    def place(path: Any, x: Any) -> Sharding:
        for start in range(len(path)):
            weight = weights.get(_named(path[start:]))
            if weight is None:
                continue
            if weight.shape == x.shape:
                return weight.sharding
            if isinstance(whole, NamedSharding):
                return NamedSharding(whole.mesh, _reduced(weight, x.shape))
        return whole

    return jax.tree_util.tree_map_with_path(place, state)


def in_host_memory(tree: Any, shardings: Any) -> Any:
    """Where arrays lie that are offloaded, as a tree of shardings: in the memory of the host that their devices are
    attached to, split as they would be on these. Counts, which are single numbers, stay on the devices.

    Args:
      tree: arrays or shapes.
      shardings: where they would lie on the devices, a tree like it.
    """
    return jax.tree.map(lambda x, s: s.with_memory_kind(HOST_MEMORY) if x.ndim else s, tree, shardings)


def _reduced(weight: Any, shape: tuple[int, ...]) -> PartitionSpec:
    """The weight's split without the one axis that `shape` lacks."""
    axes = range(weight.ndim)
    missing = [axis for axis in axes if weight.shape[:axis] + weight.shape[axis + 1 :] == shape]
    if len(missing) != 1:
        return PartitionSpec()
    spec = [*weight.sharding.spec, *[None] * weight.ndim][: weight.ndim]
    del spec[missing[0]]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)
