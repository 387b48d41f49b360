"""The shapes of models, for which their weights are not needed."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.files import GGUFCheckpoint, find

__all__ = ["model_shape"]

_QWEN3_8B = ModelConfig(
    vocab_size=151_936,
    embed_dim=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_dim=12_288,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    max_length=40_960,
    model_type="qwen3",
)
_QWEN3_14B = dataclasses.replace(_QWEN3_8B, embed_dim=5120, layers=40, heads=40, mlp_dim=17_408)

# What the config.json of these models says; AReaL-boba-2 are further trainings of Qwen3.
_SHIPPED = {
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "inclusionAI/AReaL-boba-2-8B": _QWEN3_8B,
    "inclusionAI/AReaL-boba-2-14B": _QWEN3_14B,
    "agentica-org/DeepCoder-14B-Preview": ModelConfig(
        vocab_size=152_064,
        embed_dim=5120,
        layers=48,
        heads=40,
        kv_heads=8,
        head_dim=128,
        mlp_dim=13_824,
        rope_theta=1e6,
        norm_eps=1e-5,
        qkv_bias=True,
        max_length=131_072,
        model_type="qwen2",
    ),
}


def model_shape(path: str) -> tuple[ModelConfig, str]:
    """The shape of the model that a path names, and where it was read.

    Of a folder only `config.json` is needed. Of a model of the hub it is read from the local cache; the shapes of the
    paper's models are known here; of others that one file is downloaded.

    Raises:
      ModelError: nothing there, or a model that is not supported.
    """
    if path.startswith("hub:"):
        return _of_hub(path)
    located = find(path)
    if located.is_dir():
        return ModelConfig.from_hf(located), str(located / "config.json")
    if located.suffix == ".gguf":
        return GGUFCheckpoint(located).config, str(located)
    raise ModelError(f"model {path!r} is neither a folder nor a .gguf file")


def _of_hub(path: str) -> tuple[ModelConfig, str]:
    # Late: importing the hub's library takes long, and local models do without.
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import logging

    name, _, revision = path.removeprefix("hub:").partition("@")
    # It tells of every retry; what comes of them is told below.
    logging.set_verbosity_error()
    fetch = functools.partial(hf_hub_download, name, "config.json", revision=revision or None)
    try:
        try:
            file = fetch(local_files_only=True)
        except errors.LocalEntryNotFoundError:
            if name in _SHIPPED and not revision:
                return _SHIPPED[name], "the table in mars2_jax.planning.models"
            file = fetch()
    except (errors.HFValidationError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as e:
        reason = str(e).splitlines()[0] if str(e) else repr(e)
        raise ModelError(
            f"model {path!r}: its config.json could not be had from the hub; give a folder that has it ({reason})"
        ) from e
    return ModelConfig.from_hf(pathlib.Path(file).parent), f"config.json of {path}"
