"""Who in a team has weights, who plays with another's, and who is served elsewhere; and which of their keys fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError

__all__ = ["check_roster", "is_served", "weight_owner", "weight_owners"]

Agents = Mapping[str, Any]
"""The section `agents` of a config."""


def is_served(agent: Any) -> bool:
    """Whether an agent (its section of the config) is a model behind an HTTP endpoint."""
    return bool(agent.endpoint.base_url)


def weight_owner(agents: Agents, name: str) -> str:
    """The agent whose weights the agent `name` plays with: the one it shares with, or itself."""
    return agents[name].share_weights_with or name


def weight_owners(agents: Agents) -> dict[str, Any]:
    """The agents that have weights of their own here, by name."""
    return {name: agent for name, agent in agents.items() if not agent.share_weights_with and not is_served(agent)}


def check_roster(config: ConfigDict, defaults: ConfigDict) -> None:
    """Checks the keys of every agent against each other.

    Args:
      config: a config whose values have the right types.
      defaults: those of an agent.

    Raises:
      ConfigError: names the key and the remedy.
    """
    for name, agent in config.agents.items():
        if agent.share_weights_with:
            _check_sharing(name, config.agents, defaults)
        if is_served(agent):
            _check_endpoint(name, config, defaults)
        else:
            _check_unused(name, agent, defaults, ("endpoint",), "endpoint.base_url is empty")
        if name in weight_owners(config.agents):
            _check_model(name, agent)


def _check_model(name: str, agent: ConfigDict) -> None:
    if not agent.model.path:
        raise ConfigError(f"config.agents.{name}.model.path is empty: name a model folder or file")
    if not re.fullmatch(r"([0-9a-fA-F]{64})?", agent.model.sha256):
        raise ConfigError(f"config.agents.{name}.model.sha256 is {agent.model.sha256!r}; it must be 64 hex digits")
    lora = agent.model.lora
    if lora.rank and not lora.targets:
        raise ConfigError(
            f"config.agents.{name}.model.lora.targets is empty: name attention, mlp or both, or set rank=0"
        )
    if lora.rank and not agent.trainable:
        raise ConfigError(
            f"config.agents.{name}.model.lora.rank is {lora.rank}, but config.agents.{name}.trainable is False: "
            "its adapters would change nothing; set rank=0"
        )


def _check_sharing(name: str, agents: Agents, defaults: ConfigDict) -> None:
    key, other = f"config.agents.{name}.share_weights_with", agents[name].share_weights_with
    if other == name:
        raise ConfigError(f"{key} is its own name: set '' for weights of its own")
    if other not in agents:
        raise ConfigError(f"{key} is {other!r}, which is no agent of this config; it has {', '.join(agents)}")
    if is_served(agents[other]):
        raise ConfigError(f"{key} is {other!r}, which is served by an endpoint: give {name} that endpoint too")
    if agents[other].share_weights_with:
        owner = agents[other].share_weights_with
        raise ConfigError(f"{key} is {other!r}, which has no weights of its own but those of {owner!r}: name {owner!r}")
    why = f"share_weights_with is {other!r}, whose weights and optimizer it has"
    _check_unused(name, agents[name], defaults, ("model", "trainable", "optimizer", "endpoint"), why)


def _check_endpoint(name: str, config: ConfigDict, defaults: ConfigDict) -> None:
    agent = config.agents[name]
    key, url = f"config.agents.{name}.endpoint", agent.endpoint.base_url
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is none
        whole = False
    if not whole or parts.query or parts.fragment:
        raise ConfigError(f"{key}.base_url is {url!r}; it must be like http://localhost:8000/v1")
    if parts.username is not None or parts.password is not None:
        # Not shown: it would be in the log then.
        raise ConfigError(f"{key}.base_url holds a user name or a password: keys go into {key}.api_key_env")
    if (base := url.rstrip("/")).endswith("/completions"):
        base = base.removesuffix("/completions").removesuffix("/chat")
        raise ConfigError(f"{key}.base_url is {url!r}; leave out what follows {base!r}: it is added")
    if not agent.endpoint.model:
        raise ConfigError(f"{key}.model is empty: give the name that the server has for the model")
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", agent.endpoint.api_key_env):
        # Nor this: it may be the key itself.
        raise ConfigError(f"{key}.api_key_env is not the name of an environment variable, which must hold the key")
    why = "endpoint.base_url says that its model is served elsewhere"
    _check_unused(name, agent, defaults, ("model", "optimizer", "enable_thinking"), why)
    for filter_ in ("top_k", "min_p"):
        if config.rollout[filter_]:
            raise ConfigError(
                f"config.rollout.{filter_} is {config.rollout[filter_]}, but agent {name!r} is served by an endpoint, "
                "whose API has no such filter: set it to 0"
            )


def _check_unused(name: str, agent: ConfigDict, defaults: ConfigDict, keys: tuple[str, ...], why: str) -> None:
    """Refuses keys that would have no effect."""
    for key in keys:
        for path, value, default in _leaves(agent[key], defaults[key], key):
            if _listed(value) != _listed(default):
                raise ConfigError(
                    f"config.agents.{name}.{path} is {value!r}, but config.agents.{name}.{why}: leave it at {default!r}"
                )


def _leaves(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(default, ConfigDict):
        for key in default:
            yield from _leaves(value[key], default[key], f"{path}.{key}")
    else:
        yield path, value, default


def _listed(value: Any) -> Any:
    """A tuple comes back from JSON as a list; everything else stands for itself."""
    return list(value) if isinstance(value, tuple | list) else value
