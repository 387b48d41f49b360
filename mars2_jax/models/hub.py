"""Checkpoints of the Hugging Face hub, in the local cache or downloaded into it."""

from __future__ import annotations

import functools
import pathlib

from mars2_jax.errors import ModelError

__all__ = ["snapshot"]

# What a decoder and its tokenizer are read from. Weights in other formats, and a second copy of them under another name
# ("consolidated.safetensors", "original/..."), stay where they are.
_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)


@functools.cache
def snapshot(name: str, revision: str | None = None) -> pathlib.Path:
    """The folder of a model of the hub, downloaded where the cache lacks it.

    `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they always mean. A process asks the hub once for a model, so
    that all of a run has the same revision.

    Args:
      name: "<owner>/<name>".
      revision: branch, tag or commit; None is the main branch.

    Raises:
      ModelError: no such model or revision, a model whose licence this account has not accepted, or no connection and
        nothing in the cache.
    """
    from huggingface_hub import errors, snapshot_download

    where = f"hub:{name}@{revision}" if revision else f"hub:{name}"
    try:
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except errors.HFValidationError as e:
        raise ModelError(f"model {where!r} is no name of the hub: write hub:<owner>/<name>[@revision]") from e
    except errors.GatedRepoError as e:
        raise ModelError(
            f"model {where!r} is gated: accept its licence on https://huggingface.co/{name} and set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ModelError(
            f"model {where!r} does not exist on the hub, or is private: check the name, or set HF_TOKEN"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise ModelError(f"model {where!r} has no such revision: give a branch, a tag or a commit") from e
    except errors.LocalEntryNotFoundError as e:
        raise ModelError(
            f"model {where!r} is not in the local cache and the hub cannot be asked (offline, or HF_HUB_OFFLINE is "
            "set): download it once with a connection, or give a folder"
        ) from e
    except (errors.HTTPError, OSError) as e:  # type: ignore[attr-defined]  # of the HTTP library below the client
        first = next(iter(str(e).splitlines()), type(e).__name__)
        raise ModelError(f"model {where!r} could not be downloaded: {first}") from e
