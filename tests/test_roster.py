"""Agents without weights of their own: which keys they may have, and what is said of the others."""

import pytest
from ml_collections import ConfigDict

from mars2_jax.config import agent_config, as_json, default_config
from mars2_jax.errors import ConfigError
from mars2_jax.roster import weight_owner, weight_owners
from mars2_jax.validation import validate

URL = "http://localhost:8000/v1"


def team() -> ConfigDict:
    """ann has weights, zoe plays with them, eve is served."""
    config = default_config()
    for name in ("ann", "eve", "zoe"):
        config.agents[name] = agent_config()
    config.agents.ann.model.path = "model.gguf"
    config.agents.zoe.share_weights_with = "ann"
    config.agents.eve.endpoint.update(base_url=URL, model="m")
    return config


def test_who_has_weights():
    config = team()
    validate(config)
    validate(ConfigDict(as_json(config)))
    assert list(weight_owners(config.agents)) == ["ann"]
    assert [weight_owner(config.agents, name) for name in ("ann", "zoe", "eve")] == ["ann", "ann", "eve"]


@pytest.mark.parametrize("thinking", ["default", "on"])
def test_a_role_of_its_own(thinking):
    config = team()
    config.agents.zoe.update(role="You review.", enable_thinking=thinking)
    config.agents.ann.update(trainable=False, enable_thinking="off")
    validate(config)


SHARES = "but config.agents.zoe.share_weights_with is 'ann', whose weights and optimizer it has: leave it at"
SERVED = "but config.agents.eve.endpoint.base_url says that its model is served elsewhere: leave it at"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("agents.zoe.share_weights_with", "bob", "is 'bob', which is no agent of this config; it has ann, eve, zoe"),
        ("agents.zoe.share_weights_with", "zoe", "is its own name: set '' for weights of its own"),
        ("agents.zoe.share_weights_with", "eve", "is 'eve', which is served by an endpoint"),
        ("agents.ann.share_weights_with", "zoe", "is 'zoe', which has no weights of its own but those of 'ann'"),
        ("agents.zoe.model.path", "m.gguf", f"is 'm.gguf', {SHARES} ''"),
        ("agents.zoe.model.lora.rank", 4, f"is 4, {SHARES} 0"),
        ("agents.zoe.model.lora.targets", ("mlp",), "is .*mlp.*leave it at .*attention"),
        ("agents.zoe.optimizer.learning_rate", 1e-3, f"is 0.001, {SHARES} 1e-06"),
        ("agents.zoe.trainable", False, f"is False, {SHARES} True"),
        ("agents.zoe.endpoint.base_url", URL, f"is '{URL}', {SHARES} ''"),
        ("agents.eve.model.path", "m.gguf", f"is 'm.gguf', {SERVED} ''"),
        ("agents.eve.optimizer.b1", 0.5, f"is 0.5, {SERVED} 0.9"),
        ("agents.eve.enable_thinking", "on", f"is 'on', {SERVED} 'default'"),
        ("agents.eve.endpoint.model", "", "is empty: give the name that the server has for the model"),
        ("agents.eve.endpoint.base_url", "localhost:8000", "is 'localhost:8000'; it must be like http://localhost:8000/v1"),
        ("agents.eve.endpoint.base_url", "http://x:y/v1", "it must be like http"),
        ("agents.eve.endpoint.base_url", "http://:8000/v1", "it must be like http"),
        ("agents.eve.endpoint.base_url", "https://x/v1?key=1", "it must be like http"),
        ("agents.eve.endpoint.base_url", "http://x/v1/chat/completions", "leave out what follows 'http://x/v1': it is"),
        ("agents.eve.endpoint.timeout", 0.0, "above 0"),
        ("agents.eve.endpoint.max_retries", -1, "at least 0"),
        ("agents.eve.endpoint.concurrency", 0, "at least 1"),
        ("agents.eve.endpoint.token_limit", "max_token", "did you mean max_tokens?"),
        ("agents.ann.endpoint.model", "m", "is 'm', but config.agents.ann.endpoint.base_url is empty: leave it at ''"),
        ("rollout.top_k", 50, "is 50, but agent 'eve' is served by an endpoint, whose API has no such filter"),
        ("rollout.min_p", 0.1, "is 0.1, but agent 'eve' is served by an endpoint"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(key, value, message):
    config = team()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=f"config.{key} .*{message}") as caught:
        validate(config)
    assert "\n" not in str(caught.value) and f"config.{key}" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("base_url", "https://me:secret@x/v1", "holds a user name or a password: keys go into .*endpoint.api_key_env"),
        ("api_key_env", "sk-secret", "is not the name of an environment variable, which must hold the key"),
    ],
)
def test_secrets_are_refused_and_not_shown(key, value, message):
    config = team()
    config.agents.eve.endpoint[key] = value
    with pytest.raises(ConfigError, match=f"config.agents.eve.endpoint.{key} {message}") as caught:
        validate(config)
    assert "secret" not in str(caught.value)
