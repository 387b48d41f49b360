"""The shape of a decoder, read from a checkpoint's own description."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from mars2_jax.errors import ModelError

__all__ = ["Llama3Rope", "ModelConfig"]

_ARCHITECTURES = {
    # model_type -> (bias on q, k and v; RMS norm on each head's q and k)
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
# What `config.json` says of each family beyond its sizes.
_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "attention_bias": False},
}


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def divisors(self, frequencies: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        """What each rotary frequency (radians a position) is divided by, in float64."""
        turns = self.original_max_length * frequencies.astype(np.float64) / (2 * np.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(ramp, 0.0, 1.0)
        return 1 / (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Frozen and hashable: it is a static argument of jitted code.

    Attributes:
      vocab_size, embed_dim, layers, heads, kv_heads, head_dim, mlp_dim: sizes; `heads` is a multiple of `kv_heads`.
      rope_theta: base of the rotary position frequencies.
      norm_eps: added to the mean square in every RMS norm.
      tied_embeddings: the output head is the embedding table.
      qkv_bias: biases on the query, key and value projections (Qwen2).
      qk_norm: RMS norm over each query and key head (Qwen3).
      max_length: longest sequence the checkpoint was made for.
      rope_scaling: None, or Llama 3.1's.
      model_type: the family's name in Hugging Face's `config.json`; of no consequence to the computation.
    """

    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_length: int = 4096
    rope_scaling: Llama3Rope | None = None
    model_type: str = "llama"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        d, h = self.embed_dim, self.head_dim
        qkv = d * (self.heads + 2 * self.kv_heads) * h
        layer = qkv + self.heads * h * d + 3 * d * self.mlp_dim + 2 * d
        layer += (self.heads + 2 * self.kv_heads) * h if self.qkv_bias else 0
        layer += 2 * h if self.qk_norm else 0
        head = 0 if self.tied_embeddings else self.vocab_size * d
        return self.vocab_size * d + self.layers * layer + d + head

    @classmethod
    def from_hf(cls, folder: str | pathlib.Path) -> ModelConfig:
        """Reads the `config.json` of a checkpoint in Hugging Face layout.

        Raises:
          ModelError: no such file, an architecture or a position encoding that the decoder does not implement.
        """
        path = pathlib.Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ModelError(f"cannot read the model configuration {path}: {e}") from e
        if not isinstance(raw, dict):
            raise ModelError(f"{path} holds a {type(raw).__name__} and not an object: is it a model's config.json?")
        kind = raw.get("model_type")
        if kind not in _ARCHITECTURES:
            raise ModelError(f"{path}: model_type {kind!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
        _refuse_unsupported(path, raw)
        qkv_bias, qk_norm = _ARCHITECTURES[kind]
        number = functools.partial(_number, path)
        whole = functools.partial(_number, path, kind=int)
        heads, embed = whole(raw, "num_attention_heads"), whole(raw, "hidden_size")
        rope = _rope(path, raw)
        return cls(
            vocab_size=whole(raw, "vocab_size"),
            embed_dim=embed,
            layers=whole(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=whole(raw, "num_key_value_heads", heads),
            head_dim=whole(raw, "head_dim", embed // heads),
            mlp_dim=whole(raw, "intermediate_size"),
            rope_theta=float(number(rope, "rope_theta", number(raw, "rope_theta", 10_000.0))),
            norm_eps=number(raw, "rms_norm_eps"),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            max_length=whole(raw, "max_position_embeddings", 4096),
            rope_scaling=_rope_scaling(path, rope),
            model_type=kind,
        )

    @classmethod
    def from_gguf(
        cls,
        name: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, tuple[int, ...]],
        rope_factors: Float[np.ndarray, " pairs"] | None = None,
    ) -> ModelConfig:
        """Reads GGUF metadata.

        Args:
          name: the file, for messages.
          fields: metadata keys and values.
          tensors: tensor names and shapes, in [out, in] order.
          rope_factors: the file's `rope_freqs.weight`, which divides the rotary frequencies.

        Raises:
          ModelError: an architecture or a position encoding that the decoder does not implement, a missing key.
        """
        kind = fields.get("general.architecture")
        if kind not in _ARCHITECTURES:
            raise ModelError(f"{name}: architecture {kind!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
        if (scaling := fields.get(f"{kind}.rope.scaling.type", "none")) != "none":
            raise ModelError(
                f"{name}: rotary scaling {scaling!r} of a GGUF file is not supported; use the safetensors checkpoint"
            )
        qkv_bias, qk_norm = _ARCHITECTURES[kind]
        try:
            heads = fields[f"{kind}.attention.head_count"]
            embed = fields[f"{kind}.embedding_length"]
            head_dim = fields.get(f"{kind}.attention.key_length", embed // heads)
            theta = _exact(fields.get(f"{kind}.rope.freq_base", 10_000.0))
            return cls(
                vocab_size=tensors["token_embd.weight"][0],
                embed_dim=embed,
                layers=fields[f"{kind}.block_count"],
                heads=heads,
                kv_heads=fields.get(f"{kind}.attention.head_count_kv", heads),
                head_dim=head_dim,
                mlp_dim=fields[f"{kind}.feed_forward_length"],
                rope_theta=theta,
                norm_eps=_exact(fields[f"{kind}.attention.layer_norm_rms_epsilon"]),
                tied_embeddings="output.weight" not in tensors,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                max_length=fields[f"{kind}.context_length"],
                rope_scaling=None if rope_factors is None else _recognise(name, rope_factors, theta, head_dim),
                model_type=kind,
            )
        except KeyError as e:
            raise ModelError(f"{name} lacks the metadata key or tensor {e.args[0]!r}") from e

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that `transformers`, vLLM and `from_hf` read as this very config.

        Types of numbers and tokens are not among it. Rotary settings are in the form of before transformers 5, which
        newer ones read too.

        Raises:
          ModelError: no family that Hugging Face knows combines biases and norms so.
        """
        if _ARCHITECTURES[self.model_type] != (self.qkv_bias, self.qk_norm):
            raise ModelError(f"no {self.model_type} model has qkv_bias={self.qkv_bias} and qk_norm={self.qk_norm}")
        scaling = self.rope_scaling and dict(
            rope_type="llama3",
            factor=self.rope_scaling.factor,
            low_freq_factor=self.rope_scaling.low_freq_factor,
            high_freq_factor=self.rope_scaling.high_freq_factor,
            original_max_position_embeddings=self.rope_scaling.original_max_length,
        )
        return dict(
            **_FAMILY_KEYS[self.model_type],
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.embed_dim,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.mlp_dim,
            hidden_act="silu",
            rms_norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=scaling,
            max_position_embeddings=self.max_length,
            tie_word_embeddings=self.tied_embeddings,
        )


def _recognise(name: str, factors: np.ndarray, theta: float, head_dim: int) -> Llama3Rope:
    """Llama 3.1's scaling behind a table of factors, which does not say its parameters.

    Llama 3.1 to 3.3 differ in `factor` alone, and the table's largest entry is it. The table that follows from it must
    be the file's, else the scaling is another one and is refused.
    """
    scaling = Llama3Rope(float(factors.max()), 1.0, 4.0, 8192)
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if factors.shape != frequencies.shape or not np.allclose(factors, scaling.divisors(frequencies), rtol=1e-4):
        raise ModelError(
            f"{name}: the rotary scaling of the tensor rope_freqs.weight is not Llama 3.1's, and no other is "
            "supported; use the safetensors checkpoint"
        )
    return scaling


def _exact(stored: float) -> float:
    """The number that was meant by one that a GGUF file rounded to float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(stored)))


def _number(path: pathlib.Path, raw: Mapping[str, Any], key: str, default: Any = None, *, kind: type = float) -> Any:
    """The number above 0 at a key of a JSON object; null is as good as absent."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ModelError(f"{path} lacks the key {key!r}")
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not right or (kind is int and not isinstance(value, int)):
        raise ModelError(f"{path}: {key} is {value!r}; it must be a {'whole ' if kind is int else ''}number above 0")
    return value


def _rope(path: pathlib.Path, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`; before it, `rope_scaling` beside a top-level `rope_theta`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{path}: the rope settings are {rope!r}; they must be an object")
    return rope


def _rope_scaling(path: pathlib.Path, rope: Mapping[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "llama3":
        return Llama3Rope(
            factor=float(_number(path, rope, "factor")),
            low_freq_factor=float(_number(path, rope, "low_freq_factor")),
            high_freq_factor=float(_number(path, rope, "high_freq_factor")),
            original_max_length=_number(path, rope, "original_max_position_embeddings", kind=int),
        )
    raise ModelError(f"{path}: rope type {kind!r} is not supported; supported: default, llama3")


def _refuse_unsupported(path: pathlib.Path, raw: Mapping[str, Any]) -> None:
    """Settings that change the computation and that the decoder does not implement must not be passed over."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    # Mistral slides unless the key says null; Qwen's key counts only where use_sliding_window is on.
    slides = raw.get("sliding_window", 4096) if raw["model_type"] == "mistral" else raw.get("use_sliding_window")
    if slides:
        raise ModelError(f"{path}: sliding window attention is not supported")
    if raw.get("model_type") in ("llama", "qwen3") and raw.get("attention_bias"):
        raise ModelError(f"{path}: attention_bias is not supported for {raw['model_type']}")
    if raw.get("mlp_bias"):
        raise ModelError(f"{path}: mlp_bias is not supported")
