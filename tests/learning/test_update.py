import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.config import agent_config, default_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning import logprobs
from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.learning.update import Learner, make_optimizer
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from tests.learning import reference

VOCAB, BUDGET, TEMPERATURE = 31, 12, 0.7
TINY = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=False
)
MARS2_PLUS = dict(ratio="gspo", tis="token", overlong_buffer=4, overlong_factor=0.5)


@functools.lru_cache
def _model(seed=0, config=TINY):
    """Never changed by a test: updates copy the weights."""
    return Decoder(config, nnx.Rngs(seed))


def _learner(model, *, temperature=TEMPERATURE, learning_rate=1e-2, **changes):
    learning = default_config().learning
    learning.update(dict(kl_coef=0.1) | changes)
    optimizer = agent_config().optimizer
    # A large eps makes Adam's first step proportional to small gradients, so that rounding of a gradient near 0 does
    # not flip the sign of a step.
    optimizer.update(dict(learning_rate=learning_rate, eps=1e-3))
    return Learner.create(model, learning, optimizer, temperature=temperature, budget=BUDGET)


def _host(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def _naive_logprobs(params, graphdef, samples):
    """Each row alone and unpadded, with the whole vocabulary's logits: [R] log-probabilities and [R] entropies."""
    model, results = nnx.merge(graphdef, params), []
    for sample in samples:
        row = np.concatenate([sample.prompt, sample.tokens])[None]
        log_p = jax.nn.log_softmax(model.logits(model(row))[0] / TEMPERATURE)[len(sample.prompt) - 1 : -1]
        results.append((log_p[jnp.arange(len(sample.tokens)), sample.tokens], -(jnp.exp(log_p) * log_p).sum(-1)))
    return results


@functools.lru_cache
def _model_logprobs():
    """Those of the default model on the default samples."""
    graphdef, params = nnx.split(_model())
    return jax.device_get(jax.jit(lambda p: _naive_logprobs(p, graphdef, _samples()))(params))


TREES = {
    "a": TreeArrays(
        reward=np.array([0, 1, 0, 0, 0.5, 1, 0], np.float32),
        parent=np.array([-1, 0, 0, 1, 1, 2, 5], np.int32),
        agent=np.array([-1, 0, 1, 0, 1, 0, 0], np.int32),
        graded=np.array([0, 1, 1, 1, 1, 1, 1], bool),
        length=np.array([0, 9, 5, 11, 12, 7, 3], np.int32),
    ),
    "b": TreeArrays(
        reward=np.array([0, 0, 1, np.nan], np.float32),
        parent=np.array([-1, 0, 1, 0], np.int32),
        agent=np.array([-1, 1, 0, 0], np.int32),
        graded=np.array([0, 1, 1, 0], bool),
        length=np.array([0, 2, 6, 1], np.int32),
    ),
}


def _samples(seed=0):
    """Agent 0's nodes of TREES; lp_old is not the model's own, so that the ratios are not 1."""
    rng = np.random.default_rng(seed)
    samples = []
    for key, tree in TREES.items():
        for slot in np.nonzero((tree.agent == 0) & tree.graded)[0]:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 15))
            tokens = rng.integers(0, VOCAB, tree.length[slot])
            lp = [rng.normal(-3.4, 0.3, len(tokens)).astype(np.float32) for _ in range(3)]
            samples.append(Sample(key, int(slot), prompt, tokens, *lp))
    return samples


def _naive_update(learner, params, samples):
    """The update written out: loops for advantages and loss, whole-vocabulary log-probabilities, AdamW by hand."""
    config = learner.learning
    advantages, shaped = {}, {}
    for key, tree in TREES.items():
        raw = np.where(tree.graded, np.nan_to_num(tree.reward), 0).astype(np.float64)
        if config.overlong_factor:
            raw += [
                reference.overlong(n, BUDGET, config.overlong_buffer, config.overlong_factor) if g else 0
                for n, g in zip(tree.length, tree.graded)
            ]
        shaped[key] = reference.shaped(raw, tree.parent, tree.graded, config.gamma, config.lam)
        advantages[key] = reference.group_advantages(shaped[key], tree.graded, np.zeros(99), "std", "mean")

    width = max(len(s.tokens) for s in samples)

    def padded(rows):
        return np.stack([np.pad(np.asarray(r, np.float64), (0, width - len(r))) for r in rows])

    lp, entropy = zip(*_model_logprobs())
    fixed = dict(
        lp_old=padded([s.lp_old for s in samples]),
        lp_roll=padded([s.logprobs for s in samples]),
        lp_ref=padded([s.lp_ref for s in samples]),
        entropy=padded(entropy),
        advantage=[advantages[s.tree][s.slot] for s in samples],
        mask=padded([np.ones(len(s.tokens)) for s in samples]) > 0,
        config=config,
        budget=BUDGET,
    )
    # d loss / d lp by central differences of the loops, then back through the model.
    lp = padded(lp)
    slope = np.zeros_like(lp)
    for at in zip(*np.nonzero(fixed["mask"])):
        high, low = lp.copy(), lp.copy()
        high[at] += 1e-5
        low[at] -= 1e-5
        slope[at] = (reference.policy_loss(high, **fixed) - reference.policy_loss(low, **fixed)) / 2e-5

    def linear(params):
        rows = [row for row, _ in _naive_logprobs(params, learner.graphdef, samples)]
        return sum((row * jnp.asarray(slope[i, : len(row)], jnp.float32)).sum() for i, row in enumerate(rows))

    gradient = jax.jit(jax.grad(linear))(params)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in _host(gradient)))
    rate, eps = learner.optimizer.learning_rate, learner.optimizer.eps
    new = []
    for p, g in zip(_host(params), _host(gradient)):
        g = g * min(1.0, learner.optimizer.max_grad_norm / norm)
        new.append(p - rate * g / (np.abs(g) + eps))  # first step of Adam: m̂ = g, v̂ = g²
    return new, dict(loss=reference.policy_loss(lp, **fixed), grad_norm=norm), shaped, advantages


@pytest.mark.parametrize("changes", [dict(), MARS2_PLUS], ids=["mars2", "mars2_plus"])
def test_an_update_equals_the_loops(changes):
    model = _model()
    # With gspo the loops and GSPO-token agree where a row's tokens weigh the same: weights of 1 here.
    samples = _samples()
    if changes:
        samples = [dataclasses.replace(s, logprobs=s.lp_old) for s in samples]
    learner = _learner(model, **changes)
    params = nnx.state(model)
    new, want, shaped, advantage = _naive_update(learner, params, samples)
    batch, keys = make_batch(samples, TREES, micro_batch_size=2)
    state, metrics, trees = learner.update(learner.init(params), batch)
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], want["grad_norm"], rtol=1e-4)
    for i, key in enumerate(keys):
        nodes = len(TREES[key].reward)
        np.testing.assert_allclose(trees.shaped[i, :nodes], shaped[key], atol=1e-6)
        np.testing.assert_allclose(trees.advantage[i, :nodes], advantage[key], atol=2e-5)
    before = _host(params)
    for old, a, b in zip(before, _host(state.params), new):
        np.testing.assert_allclose(a - old, b - old, atol=2e-6, rtol=1e-3)
    assert int(state.step) == 1


def _update(learner, model, samples, micro):
    batch, _ = make_batch(samples, TREES, micro_batch_size=micro)
    state, metrics, trees = learner.update(learner.init(nnx.state(model)), batch)
    return _host(state.params), {k: float(v) for k, v in metrics.items()}, trees


@pytest.mark.parametrize("aggregation, sizes", [("token_mean", (2, 4)), ("seq_mean", (2,))])
def test_the_split_into_micro_batches_changes_nothing(aggregation, sizes):
    model = _model()
    learner = _learner(model, aggregation=aggregation)
    whole, want, _ = _update(learner, model, _samples(), 5)
    assert want["nodes"] == 5
    # 5 rows as 2 + 2 + 1 and a row of padding, as 4 + 1 and three of padding; in another order.
    for micro in sizes:
        split, metrics, _ = _update(learner, model, _samples()[::-1], micro)
        for a, b in zip(split, whole):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert metrics == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_the_width_of_the_padding_changes_nothing():
    model = _model()
    learner = _learner(model)
    params = nnx.state(model)
    samples = _samples()
    batch, _ = make_batch(samples, TREES, micro_batch_size=5)

    def wider(x):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 8)])

    packed = batch.samples
    wide_rows = dataclasses.replace(packed.rows, tokens=wider(packed.rows.tokens), mask=wider(packed.rows.mask))
    wide = dataclasses.replace(
        packed, rows=wide_rows, **{k: wider(getattr(packed, k)) for k in ("lp_roll", "lp_old", "lp_ref")}
    )
    _, want, _ = learner.update(learner.init(params), batch)
    _, got, _ = learner.update(learner.init(params), dataclasses.replace(batch, samples=wide))
    assert {k: float(v) for k, v in got.items()} == pytest.approx({k: float(v) for k, v in want.items()}, rel=1e-5)


def test_metrics_are_means_over_the_sampled_tokens():
    model = _model()
    learner = _learner(model)
    samples = _samples()
    _, metrics, trees = _update(learner, model, samples, 2)
    lp, entropy = zip(*_model_logprobs())
    lp, entropy = np.concatenate(lp), np.concatenate(entropy)
    old, roll, ref = (np.concatenate([getattr(s, n) for s in samples]) for n in ("lp_old", "logprobs", "lp_ref"))
    advantage = np.concatenate([np.full(len(s.tokens), trees.advantage["ab".index(s.tree), s.slot]) for s in samples])
    ratio = np.exp(lp - old)
    clipped = ((ratio > 1.28) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    want = dict(
        entropy=entropy.mean(),
        kl=np.mean(np.exp(ref - lp) - 1 - (ref - lp)),
        ratio=ratio.mean(),
        clip_fraction=clipped.mean(),
        logprob_gap=np.abs(old - roll).mean(),
        rollout_weight=1.0,
        tokens=len(lp),
        nodes=5,
        reward_mean=np.mean([TREES[s.tree].reward[s.slot] for s in samples]),
        zero_advantage_trees=0.0,
    )
    assert 0 < want["clip_fraction"] < 1
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-4)


def test_scores_are_those_of_the_sampling_temperature_whatever_the_neighbours():
    model = _model()
    learner = _learner(model)
    samples = _samples()
    prompts, responses = [s.prompt for s in samples], [s.tokens for s in samples]
    scores = learner.score_responses(nnx.state(model), prompts, responses)
    for sample, score, (want, _) in zip(samples, scores, _model_logprobs()):
        assert score.shape == sample.tokens.shape
        np.testing.assert_allclose(score, want, rtol=1e-5, atol=1e-5)


def test_logits_in_pieces_give_the_same_numbers_and_gradients(monkeypatch):
    model = _model()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 32))
    prompt_length = np.array([1, 7, 16], np.int32)

    def outputs(params):
        lp, entropy = logprobs.response_logprobs(
            nnx.merge(nnx.graphdef(model), params), tokens, prompt_length, 12, temperature=0.7, entropy_gradient=True
        )
        return (lp**2 + entropy).sum(), (lp, entropy)

    def run():
        return _host(jax.jit(jax.value_and_grad(outputs, has_aux=True))(nnx.state(model)))

    whole = run()
    # Room for two positions of three rows: six pieces.
    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 3 * 2 * VOCAB + 1)
    assert logprobs._chunks(3, 12, VOCAB) == 6
    for a, b in zip(run(), whole):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_same_input_gives_the_same_bits():
    model = _model()
    learner = _learner(model)
    first, second = (_update(learner, model, _samples(), 2) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first[0], second[0])) and first[1] == second[1]


def test_agents_of_one_architecture_share_the_compiled_update():
    one, two = _model(1), _model(2)
    a, b = _learner(one), _learner(two)
    assert a == b and hash(a) == hash(b)
    assert a != _learner(one, gamma=0.25)


def test_updates_leave_the_weights_that_came_in_untouched():
    model = _model()
    learner = _learner(model)
    params = nnx.state(model)
    before = _host(params)
    batch, _ = make_batch(_samples(), TREES, micro_batch_size=2)
    state = learner.init(params)
    new, _, _ = learner.update(state, batch)
    assert all((a == b).all() for a, b in zip(before, _host(params)))
    assert any((a != b).any() for a, b in zip(before, _host(new.params)))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_equal_rewards_and_no_kl_change_nothing():
    model = _model()
    learner = _learner(model, kl_coef=0.0)
    same = {k: dataclasses.replace(t, reward=np.full_like(t.reward, 1 / 3)) for k, t in TREES.items()}
    batch, _ = make_batch(_samples(), same, micro_batch_size=2)
    state, metrics, trees = learner.update(learner.init(nnx.state(model)), batch)
    assert metrics["grad_norm"] == 0 and metrics["zero_advantage_trees"] == 1 and not np.any(trees.advantage)
    assert all((a == b).all() for a, b in zip(_host(nnx.state(model)), _host(state.params)))


def test_nodes_of_another_agent_move_the_baseline_only():
    """Agent 1's responses are no rows of agent 0's update: input embeddings of tokens that agent 0 neither read nor
    wrote stay bit for bit, while agent 1's rewards do enter the advantages."""
    model = _model()
    learner = _learner(model)
    samples = _samples()
    used = np.unique(np.concatenate([np.r_[s.prompt, s.tokens] for s in samples]))
    low = [dataclasses.replace(s, prompt=s.prompt % 20, tokens=s.tokens % 20) for s in samples]
    assert used.max() >= 20
    params, _, trees = _update(learner, model, low, 2)
    table = [i for i, x in enumerate(jax.tree_util.tree_leaves_with_path(nnx.state(model))) if "embedding" in str(x[0])]
    before, after = _host(nnx.state(model))[table[0]], params[table[0]]
    assert (before[20:] == after[20:]).all() and (before[:20] != after[:20]).any()

    changed = TREES | {"a": dataclasses.replace(TREES["a"], reward=np.array([0, 1, 1, 0, 1, 1, 0], np.float32))}
    batch, _ = make_batch(low, changed, micro_batch_size=2)
    _, _, other = learner.update(learner.init(nnx.state(model)), batch)
    assert np.abs(other.advantage[0, 1] - trees.advantage[0, 1]) > 0.05


def test_warm_up_is_linear_and_loses_no_update():
    config = agent_config().optimizer
    config.update(dict(learning_rate=0.4, warmup_updates=4, max_grad_norm=1e9))
    optimizer = make_optimizer(config)
    params = {"w": jnp.zeros((1, 1))}
    state = optimizer.init(params)
    steps = []
    for _ in range(6):
        change, state = optimizer.update({"w": jnp.ones((1, 1))}, state, params)
        steps.append(-float(change["w"][0, 0]))
    np.testing.assert_allclose(steps, [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-4)


def test_weight_decay_spares_norms_and_biases():
    config = agent_config().optimizer
    config.update(dict(learning_rate=0.1, weight_decay=0.5))
    optimizer = make_optimizer(config)
    params = nnx.state(_model(config=dataclasses.replace(TINY, qkv_bias=True)))
    params = jax.tree.map(jnp.ones_like, params)
    gradient = jax.tree.map(jnp.zeros_like, params)
    change, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradient, params)
    for path, x in jax.tree_util.tree_leaves_with_path(change):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.any(x)) == ("bias" not in name and "scale" not in name), name


def test_a_temperature_of_zero_is_an_error():
    with pytest.raises(ConfigError, match="rollout.temperature"):
        _learner(_model(), temperature=0.0)


def test_a_bad_overlong_buffer_is_an_error_at_creation():
    with pytest.raises(ConfigError, match="learning.overlong_buffer"):
        _learner(_model(), overlong_factor=1.0, overlong_buffer=0)


# --- Learning is real --------------------------------------------------------------------------------------------

ARMS = 8
BANDIT = ModelConfig(
    vocab_size=ARMS, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=True
)
PROMPT = np.array([3, 1])
PAYS = (np.arange(ARMS)[:, None] + np.arange(ARMS)) % 2 == 0
"""Whether the response (a, b) pays: half of all responses do."""


@functools.partial(jax.jit, static_argnums=0)
def _two_token_probabilities(graphdef, params):
    """p(a, b | PROMPT) of every response of two tokens."""
    model = nnx.merge(graphdef, params)
    rows = jnp.concatenate([jnp.tile(PROMPT, (ARMS, 1)), jnp.arange(ARMS)[:, None]], axis=1)
    p = jax.nn.softmax(model.logits(model(rows)))
    return p[0, len(PROMPT) - 1][:, None] * p[:, len(PROMPT)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [dict(), MARS2_PLUS, dict(estimator="grpo", baseline="leave_one_out", group="tree_agent")],
    ids=["mars2", "mars2_plus", "grpo"],
)
def test_updates_raise_the_expected_reward(changes, seed):
    """Two tokens are drawn from the model; the reward is 1 if their sum is even. From one half to above 0.9."""
    rng = np.random.default_rng(seed)
    model = _model(seed, BANDIT)
    learner = _learner(model, temperature=1.0, learning_rate=1e-2, **(dict(kl_coef=1e-3) | changes))
    reference_params = nnx.state(model)
    state = learner.init(reference_params)
    expected = []
    for _ in range(30):
        p = np.asarray(_two_token_probabilities(learner.graphdef, state.params), np.float64).ravel()
        expected.append(p[PAYS.ravel()].sum() / p.sum())
        trees, drawn = {}, []
        for tree in range(4):
            pairs = rng.choice(ARMS * ARMS, 8, p=p / p.sum())
            responses = np.stack([pairs // ARMS, pairs % ARMS], 1)
            trees[tree] = TreeArrays(
                reward=np.concatenate([[0], PAYS[responses[:, 0], responses[:, 1]]]).astype(np.float32),
                parent=np.array([-1] + [rng.integers(0, v) for v in range(1, 9)], np.int32),
                agent=np.array([-1] + [0, 1] * 4, np.int32),
                graded=np.arange(9) > 0,
                length=np.array([0] + [2] * 8, np.int32),
            )
            drawn += [(tree, slot, responses[slot - 1]) for slot in range(1, 9)]
        prompts, responses = [PROMPT] * len(drawn), [r for _, _, r in drawn]
        old = learner.score_responses(state.params, prompts, responses)
        ref = learner.score_responses(reference_params, prompts, responses)
        samples = [Sample(t, s, PROMPT, r, o, o, f) for (t, s, r), o, f in zip(drawn, old, ref)]
        state, _, _ = learner.update(state, make_batch(samples, trees, micro_batch_size=16)[0])
    assert 0.35 < expected[0] < 0.65
    assert expected[-1] > 0.9, expected
