"""Weights of the layers in eight bits, for decoding: symmetric, with one scale for each output channel.

A weight W [outputs, inputs] is kept as int8 codes Q and float32 scales s with W ≈ s Q, s = max |W| of a row / 127, so
that no element is off by more than s / 2. A matmul multiplies with Q, in the activations' type, and its result with s.
Norms, biases, the embedding and the head stay as they are: the first are small, and in the last rounding would go
straight into the log-probabilities.

Ours, because `qwix.quantize_model` (0.1.8) does not fit this decoder: its quantized weights refuse the reshape before
their matmul (attention's have axes for heads), it intercepts one method, and the engine calls another; and every call
makes a new class, so that no two agents would share a compiled program.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8

from mars2_jax.models.decoder import Decoder

__all__ = ["quantize", "quantize_weight", "quantized_decoder"]

# Weights that are quantized, and how many of their last axes are contracted in their matmul.
_INPUTS = {"qkv": 1, "out": 3, "gate": 1, "up": 1, "down": 1}

_LARGEST = 127


def quantize_weight(
    weight: Float[Array, "*outputs_and_inputs"], inputs: int
) -> tuple[Int8[Array, "*outputs_and_inputs"], Float[Array, "*outputs"]]:
    """Codes and scales of a weight of which the last `inputs` axes are contracted. A row of zeros has scale 1."""
    axes = tuple(range(weight.ndim - inputs, weight.ndim))
    wide = weight.astype(jnp.float32)
    largest = jnp.abs(wide).max(axes)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    return jnp.round(wide / jnp.expand_dims(scale, axes)).astype(jnp.int8), scale


def _quantized(weight: nnx.Param, inputs: int) -> tuple[nnx.Param, nnx.Param]:
    """Codes and scales with the logical axes that the weight has."""
    codes, scale = quantize_weight(weight[...], inputs)
    outputs = weight.get_metadata("axes")[: scale.ndim]
    return weight.replace(codes), nnx.Param(scale, axes=outputs)


def quantize(params: nnx.State) -> nnx.State:
    """The state of a `quantized_decoder`, from that of a plain one or a part of it; adapters are handed through."""
    quantized = []
    for path, variable in nnx.to_flat_state(params):
        if path[-1] in _INPUTS:
            variable, scale = _quantized(variable, _INPUTS[path[-1]])
            quantized.append(((*path[:-1], f"{path[-1]}_scale"), scale))
        quantized.append((path, variable))
    return nnx.from_flat_state(quantized)


def quantized_decoder(decoder: Decoder) -> Decoder:
    """The same decoder with int8 weights, of shapes only; its adapters stay in float."""

    def convert(decoder: Decoder) -> Decoder:
        for block in decoder.blocks:
            for module in (block.attention, block.mlp):
                for name, inputs in _INPUTS.items():
                    if hasattr(module, name):
                        weight, scale = _quantized(getattr(module, name), inputs)
                        setattr(module, name, weight)
                        setattr(module, f"{name}_scale", nnx.data(scale))  # it was None, which is static
        return decoder

    return nnx.eval_shape(convert, decoder)
