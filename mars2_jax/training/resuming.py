"""Whether a run may go on from a checkpoint: under this config, and with this code."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mars2_jax.errors import ConfigError
from mars2_jax.training.provenance import code_version
from mars2_jax.validation import check_key

__all__ = ["check_code", "check_resumable"]

_MAY_CHANGE = ("training", "eval", "sft", "grading.isolation", "grading.workers", "grading.cache")
"""Config keys that a resumed run may change: they do not touch what is learned (`training.steps` only how long).
`training.may_change` of the resuming config adds others."""


def check_resumable(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    may_change: Sequence[str] = (),
    always: Sequence[str] = _MAY_CHANGE,
) -> list[str]:
    """Refuses to go on with a run under a config that would have made another one.

    Args:
      saved: the config of the checkpoint.
      now: that of the resuming run.
      may_change: keys, or groups of them, that may differ beside those that always may.
      always: those.

    Returns:
      A line for each key that differs by `may_change`.

    Raises:
      ConfigError: names the first key that differs and may not.
    """
    within = lambda key, allowed: any(key == group or key.startswith(f"{group}.") for group in allowed)
    before, after = _flat(saved), _flat(now)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        # A key that is younger than the run: it did what the default now does.
        old, new = before[key] if key in before else check_key(key), after.get(key)
        if old == new or within(key, always):
            continue
        if not within(key, may_change):
            raise ConfigError(
                f"config.{key} is {new!r}, but the run in this workdir was started with {old!r}: put it back, allow "
                f"the change with config.training.may_change=('{key}',), or choose another --workdir"
            )
        lines.append(f"config.{key} was {old!r} and is {new!r} from here on")
    return lines


def check_code(saved: Mapping[str, str]) -> None:
    """Warns where a checkpoint was written by other code than this (see `code_version`)."""
    now = code_version()
    if changed := [f"{name} {saved.get(name, '')!r} -> {now[name]!r}" for name in now if saved.get(name) != now[name]]:
        logging.getLogger(__name__).warning(
            "the checkpoint was written by other code (%s): what follows may differ from an uninterrupted run",
            ", ".join(changed),
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
