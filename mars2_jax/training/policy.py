"""The models that a run's agents play with: files opened early, weights placed and handed over."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.models.cache import Layout
from mars2_jax.models.causal_attention import choose_attention
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decode_attention import layout_for
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.files import find, open_checkpoint
from mars2_jax.models.lora import Lora
from mars2_jax.models.tokenizer import ChatTokenizer, load_tokenizer
from mars2_jax.models.weights import abstract_decoder, check_tensors, load
from mars2_jax.parallel.mesh import param_shardings, platform, rollout_mesh
from mars2_jax.rollout.handover import Handover
from mars2_jax.roster import weight_owners

__all__ = [
    "ModelFile",
    "Weights",
    "abstract_policy",
    "check_length",
    "engine_layout",
    "longest_sample",
    "longest_sequence",
    "make_handover",
    "open_models",
]


class Weights(NamedTuple):
    """The weights of one checkpoint, held once for all agents that name it.

    Attributes:
      base: in the type that the model computes in. Adapters stand on them, and they are the reference of the KL term;
        None where no agent learns with either.
      master: in float32, which agents without adapters start to learn from; None where there is no such agent.
      rollout: handed over to the engines. Frozen agents decode with them, and the adapters of engines stand on them.
        The very arrays of `base` where nothing is moved and nothing quantized.
    """

    base: nnx.State | None
    master: nnx.State | None
    rollout: nnx.State


class ModelFile:
    """What is known of a model before its weights are read, so that mistakes show up early.

    Raises:
      ModelError: missing, damaged, of another checksum, or not supported.
      ConfigError: sequences longer than the model was made for, or an attention that cannot run on the mesh.
    """

    def __init__(self, model: FrozenConfigDict, longest: int, mesh: Mesh, *, key: str = "agents.<name>.model"):
        self.model, self.path = model, model.path
        with open_checkpoint(self.path, model.sha256) as checkpoint:
            self.config: ModelConfig = checkpoint.config
            check_tensors(checkpoint)
            self.tokenizer: ChatTokenizer = load_tokenizer(checkpoint, str(find(self.path)))
        check_length(self.path, self.config, longest)
        self.mesh = mesh
        self.dtype, self.attention = _arithmetic(model, self.config, mesh, key)

    def abstract(self, lora: Lora | None = None) -> Decoder:
        """The decoder without arrays, with adapters where `lora` is given."""
        return abstract_decoder(self.config, dtype=self.dtype, attention=self.attention, lora=lora)

    def load(self, handover: Handover, *, base: bool, master: bool) -> Weights:
        """The weights, placed on the mesh and handed over; see `Weights` for what `base` and `master` ask for."""
        params = self.read(jnp.float32 if master else self.dtype)
        plain = _cast(params, self.dtype)
        return Weights(plain if base else None, params if master else None, handover(plain))

    def read(self, param_dtype: Any) -> nnx.State:
        """The weights in this type, placed on the mesh."""
        shardings = param_shardings(self.mesh, nnx.state(self.abstract()))
        with open_checkpoint(self.path) as checkpoint:
            return nnx.state(load(checkpoint, dtype=self.dtype, param_dtype=param_dtype, shardings=shardings))


def check_length(path: str, config: ModelConfig, longest: int) -> None:
    """Whether the model at `path` was made for sequences of `longest` tokens.

    Raises:
      ConfigError: it was not.
    """
    if longest > config.max_length:
        raise ConfigError(
            f"max_prompt_tokens + max_new_tokens of config.rollout or config.eval are {longest}, but {path} "
            f"was made for {config.max_length} tokens: lower them"
        )


def abstract_policy(
    model: FrozenConfigDict, config: ModelConfig, mesh: Mesh, *, key: str = "agents.<name>.model"
) -> Decoder:
    """An agent's decoder, adapters included, of float32 shapes and places only; the weights need not exist.

    Raises:
      ConfigError: an attention that cannot run on the mesh.
    """
    dtype, attention = _arithmetic(model, config, mesh, key)
    lora = Lora.from_config(model.lora)
    graphdef, abstract = nnx.split(abstract_decoder(config, dtype=dtype, attention=attention, lora=lora))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return nnx.merge(graphdef, jax.tree.map(place, abstract, param_shardings(mesh, abstract)))


def make_handover(decoder: Decoder, run: FrozenConfigDict, mesh: Mesh) -> Handover:
    """How the weights of a policy, which lie on `mesh`, get to its engine. See the section `rollout` of the config."""
    target = rollout_mesh(run.rollout.mesh, mesh)
    return Handover(decoder, mesh, target, int8=run.rollout.weights == "int8")


def engine_layout(decoder: Decoder, run: FrozenConfigDict, mesh: Mesh) -> Layout:
    """The layout of the cache of a policy's engine, where the training runs on `mesh`.

    Raises:
      ConfigError: an attention that cannot run there, or no such rollout mesh.
    """
    where = rollout_mesh(run.rollout.mesh, mesh)
    return layout_for(run.rollout.attention, decoder.config, decoder.dtype, where)


def _arithmetic(model: FrozenConfigDict, config: ModelConfig, mesh: Mesh, key: str) -> tuple[Any, str]:
    """The type that a policy computes in, and its attention."""
    dtype = _dtype(model.dtype, mesh)
    attention = choose_attention(
        model.attention, platform=platform(mesh), dtype=dtype, head_dim=config.head_dim, key=f"{key}.attention"
    )
    return dtype, attention


def _dtype(name: str, mesh: Mesh) -> Any:
    if name == "auto":
        return jnp.float32 if platform(mesh) == "cpu" else jnp.bfloat16
    return jnp.dtype(name)


def open_models(run: FrozenConfigDict, mesh: Mesh) -> dict[str, ModelFile]:
    """The models that the agents name, by path, for a mesh; each is opened once. Raises as `ModelFile` does."""
    longest = longest_sequence(run)
    files: dict[str, ModelFile] = {}
    for name, agent in weight_owners(run.agents).items():
        model = agent.model
        if model.path not in files:
            files[model.path] = ModelFile(model, longest, mesh, key=f"agents.{name}.model")
        known = files[model.path].model
        engine_layout(files[model.path].abstract(), run, mesh)
        for key in ("sha256", "dtype", "attention"):
            if known[key] != model[key]:
                raise ConfigError(f"agents name {model.path!r} with different model.{key}: make them equal")
    return files


def longest_sample(run: FrozenConfigDict) -> int:
    """Tokens of the longest sequence that is learned from, prompt and response."""
    return run.rollout.max_prompt_tokens + run.rollout.max_new_tokens


def longest_sequence(run: FrozenConfigDict) -> int:
    """Tokens of the longest sequence that a config allows, prompt and response."""
    rollout, single = run.rollout, run.eval
    answer = (single.max_prompt_tokens or rollout.max_prompt_tokens) + (single.max_new_tokens or rollout.max_new_tokens)
    return max(longest_sample(run), answer)


def _cast(params: nnx.State, dtype: Any) -> nnx.State:
    """The same arrays where they have the type already."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
