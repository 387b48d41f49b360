import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mars2_jax.config import agent_config, default_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.learning.optimizer import make_optimizer
from mars2_jax.learning.update import Learner, descend
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from tests.learning import reference

pytestmark = pytest.mark.usefixtures("quick_compiles")

VOCAB, BUDGET, TEMPERATURE = 31, 12, 0.7
TINY = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=False
)
MARS2_PLUS = dict(ratio="gspo", tis="token", overlong_buffer=4, overlong_factor=0.5)
OTHERS = dict(estimator="treerl", objective="cispo", kl="k1", kl_in="reward")


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


def _kl(samples, kind):
    """[N] for each tree: the KL of the responses that the agent wrote."""
    kl = {key: np.zeros(len(tree.reward), np.float32) for key, tree in TREES.items()}
    for sample in samples:
        kl[sample.tree][sample.slot] = reference.response_kl(sample.lp_old, sample.lp_ref, kind)
    return kl


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
        if config.kl_in == "reward":
            raw -= config.kl_coef * _kl(samples, config.kl)[key]
        forest = (x[None] for x in (raw, tree.parent, tree.agent, tree.graded))
        shaped[key], advantages[key] = (x[0] for x in reference.tree_advantages(*forest, [0], config.estimator))

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
        above, below = (reference.policy_loss(x, **fixed, weights_at=lp) for x in (high, low))
        slope[at] = (above - below) / 2e-5

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


@pytest.mark.parametrize("changes", [dict(), MARS2_PLUS, OTHERS], ids=["mars2", "mars2_plus", "others"])
def test_an_update_equals_the_loops(changes):
    model = _model()
    samples = _samples()
    learner = _learner(model, **changes)
    params = nnx.state(model)
    new, want, shaped, advantage = _naive_update(learner, params, samples)
    trees = TREES
    if changes is OTHERS:
        trees = {key: dataclasses.replace(TREES[key], kl=kl) for key, kl in _kl(samples, "k1").items()}
    batch, keys = make_batch(samples, trees, micro_batch_size=2)
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
    index = np.where(wider(packed.rows.mask), wider(packed.rows.index), 1)
    wide_rows = dataclasses.replace(
        packed.rows, tokens=wider(packed.rows.tokens), mask=wider(packed.rows.mask), index=index
    )
    wide = dataclasses.replace(
        packed, rows=wide_rows, **{k: wider(getattr(packed, k)) for k in ("lp_roll", "lp_old", "lp_ref")}
    )
    _, want, _ = learner.update(learner.init(params), batch)
    _, got, _ = learner.update(learner.init(params), dataclasses.replace(batch, samples=wide))
    assert {k: float(v) for k, v in got.items()} == pytest.approx({k: float(v) for k, v in want.items()}, rel=1e-5)


# What there is of a whole response: a sequence ratio, a sequence weight with a veto, means over responses.
SEQUENCES = dict(ratio="gspo", tis="sequence", tis_veto=0.45, tis_cap=1.5, aggregation="seq_mean", entropy_coef=0.01)


@pytest.mark.parametrize("micro", [1, 2])
def test_packing_changes_nothing(micro):
    """Rows of 32 tokens for samples of 10 to 22: in three rows or so instead of five."""
    model, samples = _model(), _samples()
    whole, want, trees = _update(_learner(model, **SEQUENCES), model, samples, 5)
    assert 0 < want["rollout_weight"] < 1
    learner = _learner(model, **SEQUENCES, pack_tokens=32)
    batch, _ = make_batch(samples, TREES, micro_batch_size=micro, pack_tokens=32)
    filled = int(batch.filled)
    assert filled * micro < 5 and batch.samples.valid.sum(-1).max() > 1
    state, metrics, packed_trees = learner.update(learner.init(nnx.state(model)), batch)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(want, rel=1e-4, abs=1e-6)
    np.testing.assert_array_equal(packed_trees.advantage, trees.advantage)
    for a, b in zip(_host(state.params), whole):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_batches_of_one_shape_share_a_program_however_many_rows_they_fill():
    model = _model()
    learner = _learner(model, pack_tokens=32)
    long, short = _samples(), [dataclasses.replace(s, prompt=s.prompt[:1]) for s in _samples()]
    batches = [make_batch(x, TREES, micro_batch_size=1, pack_tokens=32)[0] for x in (long, short)]
    fewest = int(batches[1].filled)
    assert fewest < int(batches[0].filled)
    # The second with as many micro-batches as the first, the last of them empty.
    size = batches[0].samples.tree.shape[0]
    pad = lambda x: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
    padded = jax.tree.map(pad, batches[1].samples)
    index = np.maximum(padded.rows.index, 1)
    padded = dataclasses.replace(padded, rows=dataclasses.replace(padded.rows, index=index))
    narrow = jax.tree.map(lambda x, like: x[..., : like.shape[-1]], padded, batches[0].samples)
    results = []
    for batch in (batches[0], dataclasses.replace(batches[1], samples=narrow)):
        state = learner.init(nnx.state(model))
        results.append(learner.update(state, batch)[1])
    assert learner.program(learner.init(nnx.state(model)))._cache_size() == 1
    assert results[1]["nodes"] == 5 and results[1]["tokens"] == results[0]["tokens"]
    assert np.isfinite(results[1]["loss"])


def test_packed_scores_are_those_of_a_row_each():
    model, samples = _model(), _samples()
    learner = _learner(model, pack_tokens=32)
    prompts, responses = [s.prompt for s in samples], [s.tokens for s in samples]
    scores = learner.score_responses(nnx.state(model), prompts, responses)
    for sample, score, (want, _) in zip(samples, scores, _model_logprobs(), strict=True):
        assert score.shape == sample.tokens.shape
        np.testing.assert_allclose(score, want, rtol=1e-5, atol=1e-5)
    assert learner.score_responses(nnx.state(model), [], []) == []


def test_scores_of_siblings_are_those_of_a_row_each(monkeypatch):
    model, samples = _model(), _samples()
    prompts, responses = [samples[i // 3].prompt for i in range(5)], [s.tokens for s in samples]
    alone, together = _learner(model), _learner(model, pack_tokens=32)
    want = alone.score_responses(nnx.state(model), prompts, responses)
    computed, score = [], Learner.score
    monkeypatch.setattr(Learner, "score", lambda *args: computed.append(args[2]) or score(*args))
    got = together.score_responses(nnx.state(model), prompts, responses)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # No row has a prompt twice.
    tokens = sum(int((rows.segment != 0).sum()) for rows in computed)
    assert tokens < sum(map(len, prompts)) + sum(map(len, responses))


def test_prompts_are_shared_where_rows_are_packed_and_the_attention_can():
    sharing = lambda attention, tokens: (
        _learner(Decoder(TINY, nnx.Rngs(0), attention=attention), pack_tokens=tokens).share_prompts
    )
    assert sharing("xla", 32) and sharing("cudnn", 32)
    assert not sharing("splash", 32) and not sharing("xla", 0)


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


def test_updates_of_two_agents_do_not_touch_each_other():
    """Nor does it matter who comes first; and the nodes of one are no rows of the other's."""
    models = [_model(1), _model(2)]
    learner = _learner(models[0])

    def run(order):
        states = [learner.init(nnx.state(model)) for model in models]
        for agent in order:
            rng = np.random.default_rng(agent)
            samples = []
            for key, tree in TREES.items():
                for slot in np.nonzero((tree.agent == agent) & tree.graded)[0]:
                    lp = rng.normal(-3.4, 0.3, tree.length[slot]).astype(np.float32)
                    tokens = rng.integers(0, VOCAB, tree.length[slot])
                    samples.append(Sample(key, int(slot), np.arange(1, 9), tokens, lp, lp, lp))
            batch, _ = make_batch(samples, TREES, micro_batch_size=2)
            other = _host(states[1 - agent])
            states[agent], _, _ = learner.update(states[agent], batch)
            assert all((a == b).all() for a, b in zip(other, _host(states[1 - agent]), strict=True))
        return states

    one, two = run([0, 1]), run([1, 0])
    for a, b, model in zip(one, two, models, strict=True):
        assert all((x == y).all() for x, y in zip(_host(a), _host(b), strict=True))
        moved = zip(_host(a.params), _host(nnx.state(model)), strict=True)
        assert any((x != y).any() for x, y in moved)


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


def test_a_temperature_of_zero_is_an_error():
    with pytest.raises(ConfigError, match="rollout.temperature"):
        _learner(_model(), temperature=0.0)


def test_a_bad_overlong_buffer_is_an_error_at_creation():
    with pytest.raises(ConfigError, match="learning.overlong_buffer"):
        _learner(_model(), overlong_factor=1.0, overlong_buffer=0)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    """Neither weights nor moments: the next step is what it would have been."""
    optimizer = agent_config().optimizer
    optimizer.update(dict(name=name, learning_rate=1e-2, weight_decay=0.1))
    params = nnx.state(_model())
    good = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    start = make_optimizer(optimizer).init(params)
    step = jax.jit(lambda gradient, *old: descend(optimizer, gradient, optax.tree.norm(gradient), *old))
    for broken in (np.nan, np.inf, -np.inf):
        gradient = jax.tree.map(lambda x, b=broken: x.at[(0,) * x.ndim].set(b), good)
        *old, skipped = step(gradient, params, start)
        assert skipped == 1
        assert all((a == b).all() for a, b in zip(_host((params, start)), _host(tuple(old)), strict=True))
    *new, skipped = step(good, *old)
    *straight, _ = step(good, params, start)
    assert skipped == 0 and all((a == b).all() for a, b in zip(_host(new), _host(straight), strict=True))
    assert any((a != b).any() for a, b in zip(_host(new[0]), _host(params), strict=True))


def test_an_update_that_overflows_says_so():
    model = _model()
    learner = _learner(model)
    params = jax.tree.map(lambda x: x * 1e30, nnx.state(model))
    batch, _ = make_batch(_samples(), TREES, micro_batch_size=2)
    state, metrics, _ = learner.update(learner.init(params), batch)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"]) and state.step == 1
    assert all((a == b).all() for a, b in zip(_host(params), _host(state.params), strict=True))
    _, metrics, _ = learner.update(learner.init(nnx.state(model)), batch)
    assert metrics["skipped"] == 0
