"""One decoder for Llama, Mistral, Qwen2 and Qwen3, in Flax NNX.

Every weight is declared once, with its shape, its logical axes and its initializer; abstract tree, shardings and
initialization follow from the declaration. Weights are stored [out, in], as checkpoints have them: XLA's CPU matmul is
fastest that way at few rows, and other platforms choose their own layout. The layers know nothing of caches: `attend`
says how a layer's queries meet keys and values, so that training, prefill and decoding run the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, Shaped

from mars2_jax.models.attention import rope_frequencies, rotate
from mars2_jax.models.causal_attention import ATTENTION_OUTPUT, causal_attention
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.lora import Adapter, Lora, adapter
from mars2_jax.parallel.mesh import constrain, param_shardings

__all__ = ["Attend", "Decoder", "init_decoder"]

Initializer = Callable[..., jax.Array]


class Attend(Protocol):
    """How layer number `layer` attends. Returns the mixed values and whatever the caller wants back per layer."""

    def __call__(
        self,
        layer: int,
        query: Float[Array, "batch length kv_heads group head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        value: Float[Array, "batch length kv_heads head_dim"],
    ) -> tuple[Float[Array, "batch length kv_heads group head_dim"], Any]: ...


def _weight(
    rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype
) -> nnx.Param:
    """A parameter with logical axis names, one a dimension, that `parallel.mesh` maps to mesh axes."""
    assert len(shape) == len(axes)
    return nnx.Param(init(rngs.params(), shape, dtype), axes=axes)


_normal = nnx.initializers.normal(0.02)
_ones = nnx.initializers.ones
_zeros = nnx.initializers.zeros


def _matmul(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], dtype: Any = None
) -> Float[Array, "tokens out"]:
    """x · weightᵀ, summed in `dtype` where it is given.

    Two-dimensional on purpose. Of a weight with more axes XLA's CPU backend makes a transposed copy in every call, and
    of activations with more it does so for the weight's gradient, which then contracts over two: forward and backward
    of an MLP take half as long again with it. Callers flatten axes of which only the first may be sharded, so that
    shardings pass through the reshape.
    """
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=dtype)


def _linear(
    x: Float[Array, "*batch in"],
    weight: Shaped[Array, "out in"],
    scale: nnx.Param | None,
    adapter: Adapter | None,
) -> Float[Array, "*batch out"]:
    """x · weightᵀ, times the scales of a weight of int8 codes, and what the weight's adapter adds."""
    flat = x.reshape(-1, x.shape[-1])
    y = _matmul(flat, weight.astype(x.dtype))
    if scale is not None:
        y = (y.astype(jnp.float32) * scale[...].reshape(-1)).astype(x.dtype)
    if adapter is not None:
        y = y + adapter(flat)
    return y.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last axis, computed in float32."""

    def __init__(self, size: int, axis: str | None, eps: float, *, rngs: nnx.Rngs, param_dtype):
        self.scale = _weight(rngs, _ones, (size,), (axis,), param_dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention.

    Queries, keys and values come from one matmul. The fused weight is laid out by key head: for each, its `group`
    query heads, its key, its value; so a split over key heads leaves every device with whole groups.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype, lora: Lora | None):
        d, k, g, h = config.embed_dim, config.kv_heads, config.group, config.head_dim
        self.group = g
        self.qkv = _weight(rngs, _normal, (k, g + 2, h, d), ("kv_heads", None, None, "embed"), param_dtype)
        self.qkv_bias = (
            _weight(rngs, _zeros, (k, g + 2, h), ("kv_heads", None, None), param_dtype) if config.qkv_bias else None
        )
        self.out = _weight(rngs, _normal, (d, k, g, h), ("embed", "kv_heads", None, None), param_dtype)
        # See `models.quantize`.
        self.qkv_scale: nnx.Param | None = None
        self.out_scale: nnx.Param | None = None
        self.qkv_lora = adapter(lora, "attention", self.qkv, 1, rngs)
        self.out_lora = adapter(lora, "attention", self.out, 3, rngs)
        norm = functools.partial(RMSNorm, h, None, config.norm_eps, rngs=rngs, param_dtype=param_dtype)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def __call__(self, x: Float[Array, "batch length embed"], sin, cos, attend) -> tuple[jax.Array, Any]:
        qkv = _linear(x, self.qkv[...].reshape(-1, x.shape[-1]), self.qkv_scale, self.qkv_lora)
        qkv = qkv.reshape(x.shape[:2] + self.qkv.shape[:3])
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...].astype(x.dtype)
        query, key, value = qkv[:, :, :, : self.group], qkv[:, :, :, self.group], qkv[:, :, :, self.group + 1]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed, extra = attend(rotate(query, sin, cos), rotate(key, sin, cos), value)
        out = self.out[...].reshape(x.shape[-1], -1)
        return _linear(mixed.reshape(x.shape[:2] + (-1,)), out, self.out_scale, self.out_lora), extra


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype, lora: Lora | None):
        d, f = config.embed_dim, config.mlp_dim
        self.gate = _weight(rngs, _normal, (f, d), ("mlp", "embed"), param_dtype)
        self.up = _weight(rngs, _normal, (f, d), ("mlp", "embed"), param_dtype)
        self.down = _weight(rngs, _normal, (d, f), ("embed", "mlp"), param_dtype)
        # See `models.quantize`.
        self.gate_scale: nnx.Param | None = None
        self.up_scale: nnx.Param | None = None
        self.down_scale: nnx.Param | None = None
        self.gate_lora = adapter(lora, "mlp", self.gate, 1, rngs)
        self.up_lora = adapter(lora, "mlp", self.up, 1, rngs)
        self.down_lora = adapter(lora, "mlp", self.down, 1, rngs)

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        gate = _linear(x, self.gate[...], self.gate_scale, self.gate_lora)
        up = _linear(x, self.up[...], self.up_scale, self.up_lora)
        return _linear(jax.nn.silu(gate) * up, self.down[...], self.down_scale, self.down_lora)


class Block(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype, lora: Lora | None):
        norm = functools.partial(
            RMSNorm, config.embed_dim, "embed", config.norm_eps, rngs=rngs, param_dtype=param_dtype
        )
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, param_dtype=param_dtype, lora=lora)
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype, lora=lora)

    def __call__(self, x: Float[Array, "batch length embed"], sin, cos, attend) -> tuple[jax.Array, Any]:
        mixed, extra = self.attention(self.attention_norm(x), sin, cos, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), extra


class Decoder(nnx.Module):
    """A decoder-only language model.

    Args:
      config: its shape.
      rngs: `nnx.Rngs` with a `params` stream, and with a `lora` stream for adapters.
      dtype: type of the activations and of the matmuls; weights are cast to it where they are used.
      param_dtype: type of the stored weights.
      attention: implementation for whole sequences, see `models.causal_attention.choose_attention` (not "auto").
      lora: adapters of the layers' weights, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        attention: str = "xla",
        lora: Lora | None = None,
    ):
        self.config = config
        self.dtype = dtype
        self.attention = attention
        table, axes = (config.vocab_size, config.embed_dim), ("vocab", "embed")
        self.embedding = _weight(rngs, _normal, table, axes, param_dtype)
        block = functools.partial(Block, config, rngs=rngs, param_dtype=param_dtype, lora=lora)
        self.blocks = nnx.List([block() for _ in range(config.layers)])
        self.norm = RMSNorm(config.embed_dim, "embed", config.norm_eps, rngs=rngs, param_dtype=param_dtype)
        self.head = None if config.tied_embeddings else _weight(rngs, _normal, table, axes, param_dtype)

    def run(
        self,
        tokens: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
        attend: Attend,
        *,
        remat: str = "none",
        scan_unroll: int = 0,
        few_tokens: bool = False,
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """The hidden states after the final norm, and what `attend` returned for each layer.

        Args:
          tokens: token ids.
          positions: position of each token in its sequence, from 0.
          attend: how each layer attends.
          remat: see `__call__`.
          scan_unroll: see `__call__`.
          few_tokens: on a mesh, False gathers the weights that fsdp has split and splits the activations by rows; True,
            for decoding, leaves the weights where they are and gives every device all activations, which are smaller.

        Returns:
          The states, and a list over the layers; under a scan one tree whose arrays have a leading axis of layers.
        """
        angles = positions[..., None].astype(jnp.float32) * rope_frequencies(self.config)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        table, rows = self.embedding[...], None if few_tokens else "rows"
        if not few_tokens:
            # Gathered over fsdp before the lookup: the rows that come out are split over fsdp themselves.
            table = constrain(table, "vocab", None)
        x = constrain(table[tokens].astype(self.dtype), rows, None, None)
        structure = nnx.graphdef(self.blocks[0])

        def layer(x: jax.Array, weights: nnx.State, index: Any) -> tuple[jax.Array, Any]:
            x, extra = nnx.merge(structure, weights)(x, sin, cos, functools.partial(attend, index))
            return constrain(x, rows, None, None), extra

        weights = [nnx.state(block) for block in self.blocks]
        if scan_unroll:
            # Inside a scan XLA cannot merge the recomputation with the first computation; no barriers are needed.
            step = _rematerialised(layer, remat, prevent_cse=False)
            stacked = _stack(weights, self.dtype)
            x, extras = jax.lax.scan(
                lambda x, xs: step(x, *xs), x, (stacked, jnp.arange(len(weights))), unroll=scan_unroll
            )
            return self.norm(x), extras
        extras = []
        for index, one in enumerate(weights):
            step = _rematerialised(lambda x, w, index=index: layer(x, w, index), remat, prevent_cse=True)
            x, extra = step(x, one)
            extras.append(extra)
        return self.norm(x), extras

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        prefix_ids: Int[Array, "batch length"] | None = None,
        remat: str = "none",
        scan_unroll: int = 0,
    ) -> Float[Array, "batch length embed"]:
        """Hidden states of whole sequences under causal attention.

        Args:
          tokens: token ids; padding goes at the end, where causality hides it.
          positions: positions; None counts from 0 in each row.
          segment_ids: tokens see only tokens of their own segment; None is one segment a row.
          prefix_ids: a segment that each token sees as well, see `causal_attention`.
          remat: what of a layer is recomputed in the backward pass: "none" of it; with "dots" all but the outputs of
            its matmuls with weights and of a fused attention; with "layer" everything.
          scan_unroll: 0 traces every layer for itself; n >= 1 stacks the layers' weights and scans over them, n layers
            a step, of which only one step is compiled.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(_, query, key, value):
            mixed = causal_attention(query, key, value, segment_ids, prefix_ids, implementation=self.attention)
            return mixed, None

        hidden, _ = self.run(tokens, positions, attend, remat=remat, scan_unroll=scan_unroll)
        return hidden

    def logits(self, hidden: Float[Array, "*batch embed"], *, few_tokens: bool = False) -> Float[Array, "*batch vocab"]:
        """Scores of the next token, in float32. `few_tokens` as in `run`."""
        table = self.embedding if self.head is None else self.head
        weight = table[...].astype(hidden.dtype)
        if not few_tokens:
            # Gathered over fsdp here, or its gradient would gather the logits' cotangent of all rows instead.
            weight = constrain(weight, "vocab", None)
        flat = hidden.reshape(-1, hidden.shape[-1])
        scores = _matmul(flat, weight, jnp.float32).reshape(*hidden.shape[:-1], -1)
        return constrain(scores, "rows", *(None,) * (scores.ndim - 2), "vocab") if scores.ndim > 1 else scores


def _rematerialised(layer: Callable[..., Any], remat: str, *, prevent_cse: bool) -> Callable[..., Any]:
    """The layer with the named policy, see `Decoder.__call__`."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return layer
    if remat == "dots":
        # Matmuls with batch axes are those of attention: their outputs are its scores.
        kept = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION_OUTPUT)
        )
        return jax.checkpoint(layer, policy=kept, prevent_cse=prevent_cse)
    if remat == "layer":
        return jax.checkpoint(layer, prevent_cse=prevent_cse)
    raise ValueError(f"remat {remat!r} is not none, dots or layer")


def _stack(layers: Sequence[nnx.State], dtype: Any) -> nnx.State:
    """The layers' weights with a leading axis of layers, each split over the mesh as before.

    Weights are cast first to the type they are used in: the copy is half as large then, and so is what devices gather.
    Vectors (the norms) are used in float32.
    """

    def stack(*variables: nnx.Variable) -> nnx.Variable:
        first = variables[0]
        arrays = [v[...] if v.ndim == 1 else v[...].astype(dtype) for v in variables]
        return first.replace(constrain(jnp.stack(arrays), None, *first.get_metadata("axes", (None,) * first.ndim)))

    return jax.tree.map(stack, *layers, is_leaf=lambda x: isinstance(x, nnx.Variable))


def init_decoder(
    config: ModelConfig,
    key: Key[Array, ""],
    mesh: Mesh | None = None,
    *,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    attention: str = "xla",
) -> Decoder:
    """A decoder with random weights, made in place: each device computes its own part, and the host none.

    The weights are a function of `key` alone, whatever the mesh.

    Args:
      config: its shape.
      key: a typed key.
      mesh: where the weights lie, by `parallel.mesh.RULES`; None is the default device.
      dtype, param_dtype, attention: see `Decoder`.
    """

    def make(key: Key[Array, ""]) -> Decoder:
        return Decoder(config, nnx.Rngs(key), dtype=dtype, param_dtype=param_dtype, attention=attention)

    graphdef, abstract = nnx.split(nnx.eval_shape(make, key))
    placement = None if mesh is None else param_shardings(mesh, abstract)
    return nnx.merge(graphdef, jax.jit(lambda key: nnx.state(make(key)), out_shardings=placement)(key))
