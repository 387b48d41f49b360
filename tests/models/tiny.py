"""Small random models, and checkpoints of them that Hugging Face transformers writes."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.lora import Lora
from mars2_jax.models.weights import abstract_decoder

TINY = ModelConfig(
    vocab_size=64, embed_dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=48, tied_embeddings=True
)


def tiny_decoder(seed: int = 0, config: ModelConfig = TINY, scale: float = 4.0) -> Decoder:
    """A random decoder. Weights are scaled up so that its distributions are far from uniform."""
    decoder = Decoder(config, nnx.Rngs(seed))
    graphdef, params = nnx.split(decoder)
    params = nnx.map_state(lambda path, x: x.replace(x[...] * scale) if x[...].ndim > 1 else x, params)
    return nnx.merge(graphdef, params)


def random_decoder(
    config: ModelConfig = TINY, lora: Lora | None = None, *, trained: bool = True
) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder with random weights, equal with and without adapters; without `trained` these change nothing.

    Made by NumPy: nothing is compiled.
    """
    graphdef, abstract = nnx.split(abstract_decoder(config, lora=lora))

    def fill(path, x):
        if path[-1] == "b" and not trained:
            return x.replace(jnp.zeros(x.shape))
        rng = np.random.default_rng(zlib.crc32(str(path).encode()))
        return x.replace(jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32))

    return graphdef, nnx.map_state(fill, abstract)


def random_params(config: ModelConfig = TINY, seed: int = 0) -> nnx.State:
    """Random weights of any shape, norms and biases too; made by NumPy, so that nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    _, abstract = nnx.split(abstract_decoder(config))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.5, 0.3, x.shape), x.dtype), abstract)


def logits(decoder: Decoder, tokens) -> jnp.ndarray:
    """[length, vocab] of one sequence. Padded behind, where causality hides it, to a multiple of 32: sequences of many
    lengths share a program."""
    row = np.zeros((1, -(-len(tokens) // 32) * 32), np.int32)
    row[0, : len(tokens)] = tokens
    return _logits(*nnx.split(decoder), row)[0, : len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens):
    decoder = nnx.merge(graphdef, params)
    return decoder.logits(decoder(tokens))
