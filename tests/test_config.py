"""Which configs are honoured, and what is said of the others."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.config import agent_config, default_config, write_config
from mars2_jax.errors import ConfigError
from mars2_jax.validation import CHOICES, RANGES, check_key, validate


def good_config(agents=("coder",)):
    config = default_config()
    for name in agents:
        config.agents[name] = agent_config()
        config.agents[name].model.path = "model.gguf"
    return config


def leaves(config, path=""):
    for key, value in config.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, ConfigDict):
            yield from leaves(value, name)
        else:
            yield name, value


LEAVES = dict(leaves(good_config()))


def test_defaults_with_an_agent_are_valid():
    validate(good_config())
    validate(FrozenConfigDict(good_config(("coder", "reviewer"))))


def test_tables_name_only_keys_that_exist():
    for pattern in (*CHOICES, *RANGES):
        default = check_key(pattern.replace("*", "coder"))
        assert not isinstance(default, ConfigDict)
        if pattern in CHOICES:
            items = default if isinstance(default, tuple) else (default,)
            assert set(items) <= set(CHOICES[pattern])


def test_every_number_has_a_range_or_a_check_of_its_own():
    numbers = {name.replace("coder", "*") for name, v in LEAVES.items() if type(v) in (int, float)}
    axes = ("data", "fsdp", "tensor")
    own = {f"{mesh}.{axis}" for mesh in ("mesh", "rollout.mesh") for axis in axes} | {"learning.dual_clip"}
    assert numbers - own == RANGES.keys()


@given(st.sampled_from(sorted(LEAVES)), st.data())
def test_a_misspelt_key_is_named_with_the_nearest(name, data):
    parent, _, key = name.rpartition(".")
    assume(len(key) >= 4)
    at = data.draw(st.integers(0, len(key) - 1))
    wrong = key[:at] + key[at + 1 :]
    config = good_config()
    group = config
    for part in parent.split(".") if parent else []:
        group = group[part]
    assume(wrong not in group)
    group[wrong] = LEAVES[name]
    expected = f"config.{parent + '.' if parent else ''}{wrong} does not exist; did you mean config."
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value).startswith(expected)
    with pytest.raises(ConfigError) as caught:
        check_key(f"{parent + '.' if parent else ''}{wrong}")
    assert str(caught.value).startswith(expected)


@given(st.sampled_from(sorted(LEAVES)), st.sampled_from([None, True, 7, 0.5, "x", float("nan"), [1], {"a": 1}]))
def test_a_value_of_another_type_is_refused(name, value):
    default = LEAVES[name]
    fits = {bool: (bool,), int: (int,), float: (int, float), str: (str,), tuple: (tuple, list)}[type(default)]
    assume(type(value) not in fits or value != value)
    config = good_config()
    parent, _, key = name.rpartition(".")
    group = config
    for part in parent.split(".") if parent else []:
        group = group[part]
    del group[key]  # Assigned to an existing key, some values are cast.
    group[key] = value
    with pytest.raises(ConfigError, match=f"config.{name} must be "):
        validate(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("search.order", "agent_frst", "'agent_frst'; it may be agent_first, node_first; did you mean agent_first?"),
        ("search.nodes", 0, "is 0; it must be at least 1"),
        ("search.nodes", 2**31, "at least 1 and at most 1048576"),
        ("rollout.slots", 2**40, "at least 1 and at most 1048576"),
        ("search.max_depth", 2**31, "is 2147483648; it must be at least 0 and at most 2147483647"),
        ("search.max_children", 2**31, "at most 2147483647"),
        ("rollout.top_p", 0.0, "is 0.0; it must be above 0 and at most 1"),
        ("rollout.top_p", 1.5, "is 1.5; it must be above 0 and at most 1"),
        ("rollout.min_p", 1.0, "is 1.0; it must be at least 0 and below 1"),
        ("rollout.temperature", float("inf"), "must be finite"),
        ("learning.lam", -0.1, "is -0.1; it must be at least 0 and at most 1"),
        ("agents.coder.optimizer.b2", 1.0, "at least 0 and below 1"),
        ("agents.coder.optimizer.eps", 0.0, "at least 1e-30"),
        ("agents.coder.model.dtype", "bf16", "it may be auto, float32, bfloat16; did you mean bfloat16?"),
        ("agents.coder.model.attention", "flash", "it may be auto, xla, cudnn, splash; did you mean splash?"),
        ("learning.remat", "dot", "did you mean dots?"),
        ("learning.scan_unroll", -1, "at least 0"),
        ("agents.coder.model.path", "", "is empty: name a model folder or file"),
        ("agents.coder.model.sha256", "abc", "must be 64 hex digits"),
        ("agents.coder.model.lora.rank", -1, "at least 0"),
        ("agents.coder.model.lora.alpha", 0.0, "above 0"),
        ("agents.coder.model.lora.targets", ("mpl",), "it may be attention, mlp; did you mean mlp?"),
        ("mesh.data", 0, "must be at least 1, or -1 for all devices left"),
        ("mesh.data", -1, "more than one -1"),
        ("rollout.mesh.tensor", 2, r"rollout.mesh.data is 0; .* at least 1, or -1 .*, or all three 0 for config.mesh"),
        ("rollout.attention", "page", "it may be auto, xla, paged; did you mean paged?"),
        ("rollout.weights", "int4", "it may be model, int8; did you mean int8?"),
        ("learning.micro_batch_size", 3, "train_batch_size is 16; it must be a multiple of .*, which is 3"),
        ("learning.minibatches", 8, "train_batch_size is 16; .* multiple of minibatches, which is 8, times .* is 4"),
        ("learning.epochs", 0, "at least 1"),
        ("learning.max_staleness", -1, "at least 0"),
        ("agents.coder.optimizer.offload", "stat", "it may be none, state, all; did you mean state?"),
        ("learning.dual_clip", 1.1, "must be above 1 .+ config.learning.clip_high"),
        ("learning.overlong_factor", 1.0, "overlong_buffer is 0; .* between 1 and .*max_new_tokens, which is 256"),
        ("learning.tis_veto", 1e-4, "config.learning.tis is 'off'"),
        ("grading.cache", -1, "at least 0"),
        ("grading.checkers", ("close",), r"checkers has 'close'; each must be 'name=module:function'"),
        ("grading.checkers", ("exact=m:f",), "'exact' is built in"),
        ("grading.time_factor", 0.5, "is 0.5; it must be above 1, .* or 0 for off"),
        ("grading.time_floor", 0.5, "time_floor is 0.5, but config.grading.time_factor is 0"),
        ("learning.pack_tokens", 1279, "must hold the longest sample, max_prompt_tokens .*, which is 1280, or be 0"),
        ("agents.coder.optimizer.name", "adam", "it may be adamw, adafactor, muon; did you mean adamw?"),
        (
            "agents.coder.optimizer.schedule",
            "cosine",
            "decay_updates is 0, but schedule .cosine. decays",
        ),
        ("seed", -1, "at least 0"),
    ],
)
def test_values_and_combinations_that_are_refused(key, value, message):
    config = good_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config)
    assert "\n" not in str(caught.value)
    assert key.rpartition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "grpo", "gamma": 0.3}, "gamma is 0.3, but estimator 'grpo' does not use it: leave it at 0.5"),
        ({"estimator": "treerl", "lam": 0.3}, "lam is 0.3, but estimator 'treerl' does not use it"),
        ({"estimator": "tree_grpo", "group": "tree_agent"}, "group is 'tree_agent', but estimator 'tree_grpo'"),
        ({"estimator": "rloo", "scale": "none"}, "scale is 'none', but estimator 'rloo'"),
        ({"estimator": "sibling", "baseline": "leave_one_out"}, "baseline is 'leave_one_out', but estimator 'sibling'"),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0, but objective 'cispo' does not use it"),
        ({"objective": "cispo", "ratio": "gspo"}, "ratio is 'gspo', but objective 'cispo' weighs every token .*'ppo'"),
        ({"kl_coef": 0.0, "kl_in": "reward"}, "kl_in is 'reward', but kl_coef is 0: leave it at 'loss'"),
        ({"kl_coef": 0.0, "reference_every": 5}, "reference_every is 5, but kl_coef is 0: leave it at 0"),
        ({"kl_coef": 0.0, "kl": "k1"}, "kl is 'k1', but kl_coef is 0: leave it at 'k3'"),
        ({"estimator": "rloo", "group": "tree_agent", "objective": "cispo", "kl_in": "reward", "kl": "k1"}, None),
        ({"gamma": 0.0, "scale": "none", "baseline": "leave_one_out", "pack_tokens": 1280}, None),
        ({"epochs": 3, "minibatches": 4, "max_staleness": 12, "reference_every": 5, "overlong_mask": True}, None),
    ],
)
def test_options_of_learning_that_nothing_reads_are_refused(changes, message):
    config = good_config()
    config.learning.update(changes)
    if message is None:
        validate(config)
    else:
        with pytest.raises(ConfigError, match=f"config.learning.{message}"):
            validate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 0.9}, "momentum is 0.9, but optimizer 'adamw' does not use it: leave it at 0.95"),
        ({"name": "adafactor", "b1": 0.5}, "b1 is 0.5, but optimizer 'adafactor' does not use it"),
        ({"name": "adafactor", "eps": 1e-6}, "eps is 1e-06, but optimizer 'adafactor'"),
        ({"decay_updates": 10}, "decay_updates is 10, but schedule 'constant' does not use it"),
        ({"final_learning_rate": 1e-7}, "final_learning_rate is 1e-07, but schedule 'constant'"),
        ({"name": "muon", "momentum": 0.9, "b1": 0.8, "weight_decay": 0.1}, None),
        ({"name": "adafactor", "schedule": "linear", "decay_updates": 5, "final_learning_rate": 1e-7}, None),
    ],
)
def test_options_of_the_optimizer_that_nothing_reads_are_refused(changes, message):
    config = good_config(("coder", "reviewer"))
    config.agents.reviewer.optimizer.update(changes)
    if message is None:
        validate(config)
    else:
        with pytest.raises(ConfigError, match=f"config.agents.reviewer.optimizer.{message}"):
            validate(config)


def test_options_of_a_correction_or_a_penalty_that_is_off_are_refused():
    for changes, message in (
        ({"tis_cap": 5.0}, "tis_cap is 5.0, but tis is 'off': leave it at 2.0"),
        ({"tis_mode": "mask"}, "tis_mode is 'mask', but tis is 'off'"),
        ({"overlong_buffer": 8}, "overlong_buffer is 8, but overlong_factor is 0: leave it at 0"),
    ):
        config = good_config()
        config.learning.update(changes)
        with pytest.raises(ConfigError, match=f"config.learning.{message}"):
            validate(config)
        config.learning.update(tis="token", overlong_factor=1.0, overlong_buffer=8)
        validate(config)


def test_what_the_best_checkpoints_go_by_has_checkpoints():
    config = good_config()
    best = dict(keep_best=1, best_metric="eval/starter/pass@n")
    config.training.update(evaluate_every=10, checkpoint_every=5, **best)
    validate(config)
    config.training.update(checkpoint_every=4)
    with pytest.raises(
        ConfigError, match="every 10 steps .evaluate_every., but checkpoint_every is 4: .* a multiple of"
    ):
        validate(config)


def test_adapters_that_change_nothing_are_refused():
    config = good_config()
    config.agents.coder.model.lora.update(rank=8, targets=())
    with pytest.raises(ConfigError, match="coder.model.lora.targets is empty: name attention, mlp or both"):
        validate(config)
    config.agents.coder.model.lora.targets = ("mlp",)
    validate(config)
    config.agents.coder.trainable = False
    with pytest.raises(ConfigError, match=r"lora.rank is 8, but config.agents.coder.trainable is False: .*set rank=0"):
        validate(config)


def test_agents():
    with pytest.raises(ConfigError, match="config.agents is empty"):
        validate(default_config())
    config = good_config(("a b",))
    with pytest.raises(ConfigError, match="config.agents.a b: a name is made of letters"):
        validate(config)
    config = good_config()
    with config.ignore_type():
        config.agents.coder = "model.gguf"
    with pytest.raises(ConfigError, match="config.agents.coder must be a group of keys, is 'model.gguf'"):
        validate(config)


def test_a_missing_key_is_named():
    config = good_config()
    del config.search["nodes"]
    with pytest.raises(ConfigError, match="config.search.nodes is missing"):
        validate(config)


def test_written_config_is_the_whole_of_it(tmp_path):
    config = FrozenConfigDict(good_config(("coder", "reviewer")))
    path = write_config(config, tmp_path / "new")
    assert path == tmp_path / "new" / "config.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(config.to_dict()))  # JSON has no tuples
    restored = ConfigDict(json.loads(path.read_text()))
    validate(restored)


@pytest.mark.parametrize(
    ("agents", "search", "message"),
    [
        (2, dict(strategy="grpo"), "'grpo', which has one agent, but config.agents has 2: use 'flat_multi'"),
        (2, dict(strategy="rs2"), "'rs2', which has one agent, but config.agents has 2: use 'mars2'"),
        (2, dict(strategy="flat_multi", max_depth=2), "search.max_depth is 2, but strategy 'flat_multi' does not use"),
        (2, dict(strategy="flat_multi", in_tree_parallelism=2), "search.in_tree_parallelism is 2, but strategy"),
        (1, dict(strategy="grpo", stop_when_solved=True), "search.stop_when_solved is True, but strategy 'grpo'"),
        (2, dict(strategy="round_robin", max_children=2, guidance=0.98), "search.guidance is 0.98, but strategy"),
        (
            2,
            dict(strategy="flat_multi", order="node_first"),
            "search.order is 'node_first', but .* leave it at 'agent_",
        ),
        (2, dict(strategy="best_first", max_children=2, posterior="gaussian"), "search.posterior is 'gaussian', but"),
        (2, dict(strategy="best_first"), "max_children is 0; strategy 'best_first' fills node after node: set it"),
        (2, dict(max_depth=2, max_children=2), "search.nodes is 8, but .* a tree holds 6"),
        (2, dict(max_depth=10**9, max_children=1, nodes=9), None),
        (2, dict(max_depth=3, max_children=2, guidance=0.98, guidance_decay=0.9, in_tree_parallelism=4), None),
        (1, dict(strategy="grpo"), None),
        (2, dict(strategy="flat_multi"), None),
        (2, dict(strategy="round_robin", max_children=2), None),
    ],
)
def test_strategies_of_the_search(agents, search, message):
    config = good_config(("coder", "reviewer")[:agents])
    config.search.update(search)
    if message is None:
        validate(config)
    else:
        with pytest.raises(ConfigError, match=message):
            validate(config)


@pytest.mark.parametrize("name", ["co-der", "7", "a b", ""])
def test_names_of_agents_can_be_overridden_on_the_command_line(name):
    config = good_config()
    config.agents[name] = agent_config()
    with pytest.raises(ConfigError, match="a name is made of letters, digits and _"):
        validate(config)
