"""Loss and whole update on random forests, under random options: what `reference` says in loops, whatever the packing,
the split into micro-batches and the order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.learning.loss import policy_loss
from mars2_jax.learning.update import Learner
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from tests.learning import reference
from tests.learning.forests import SLOTS, learning, trees

pytestmark = pytest.mark.usefixtures("quick_compiles")

BUDGET = 6

# --- The loss ----------------------------------------------------------------------------------------------------

RESPONSES = 4
TOKENS = ("lp", "entropy", "lp_old", "lp_roll", "lp_ref")
one_of = st.sampled_from
tis = st.one_of(
    st.just(dict(tis="off")),
    st.fixed_dictionaries(
        dict(
            tis=one_of(["token", "sequence", "geometric"]),
            tis_mode=one_of(["truncate", "mask"]),
            tis_cap=one_of([0.9, 1.2, 2.0]),
            tis_veto=one_of([0.0, 0.3, 0.7]),
        )
    ),
)
objective = st.one_of(
    st.fixed_dictionaries(dict(ratio=one_of(["ppo", "gspo"]), dual_clip=one_of([0.0, 1.4, 3.0]))),
    st.just(dict(objective="cispo")),
)
others = st.fixed_dictionaries(
    dict(
        clip_low=one_of([0.1, 0.2, 1.0]),
        clip_high=one_of([0.1, 0.28]),
        kl=one_of(["k1", "k2", "k3"]),
        kl_coef=one_of([0.0, 0.1]),
        kl_in=one_of(["loss", "reward"]),
        entropy_coef=one_of([0.0, 0.3]),
        aggregation=one_of(["token_mean", "seq_mean", "seq_mean_token_sum_norm"]),
    )
)
options = st.tuples(objective, tis, others).map(lambda parts: functools.reduce(dict.__or__, parts))


@st.composite
def responses(draw):
    """Ragged responses, some of them empty, all of them possibly far from the weights that wrote them; garbage where
    there is no token."""
    lengths = draw(st.lists(st.integers(0, BUDGET), min_size=RESPONSES, max_size=RESPONSES).filter(any))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (RESPONSES, BUDGET)
    mask = np.arange(BUDGET) < np.array(lengths)[:, None]
    lp = rng.normal(-2, 0.5, shape)
    data = dict(lp=lp, entropy=rng.uniform(0, 3, shape))
    for name in ("lp_old", "lp_roll", "lp_ref"):
        data[name] = lp + rng.normal(0, draw(one_of([0.0, 0.05, 0.6])), shape)
    data = {name: np.where(mask, x, 50.0).astype(np.float32) for name, x in data.items()}
    advantage = rng.choice([0.0, 1.0, -1.0, rng.normal()], RESPONSES).astype(np.float32)
    return data | dict(advantage=advantage, mask=mask)


def _packed(data, layout):
    """The arguments of `policy_loss`, with the responses of each row of the layout one after the other."""
    shape = (len(layout), max(map(len, layout)) * BUDGET)
    rows = {name: np.full(shape, 50, np.float32) for name in TOKENS}
    member = np.zeros((shape[0], max(map(len, layout)), shape[1]), bool)
    advantage = np.zeros(member.shape[:2], np.float32)
    for r, row in enumerate(layout):
        start = 0
        for s, i in enumerate(row):
            end = start + data["mask"][i].sum()
            for name in TOKENS:
                rows[name][r, start:end] = data[name][i, data["mask"][i]]
            member[r, s, start:end], advantage[r, s], start = True, data["advantage"][i], end
    return rows | dict(member=member, advantage=advantage)


def _loss_and_slope(arguments, config):
    """Numerator and denominator, and the numerator's gradient by lp."""

    def loss(lp):
        terms = policy_loss(**(arguments | dict(lp=lp)), config=config, budget=BUDGET)
        return terms.numerator, terms.denominator

    (numerator, denominator), slope = jax.value_and_grad(loss, has_aux=True)(arguments["lp"])
    return float(numerator), float(denominator), np.asarray(slope)


@given(data=responses(), changes=options, order=st.permutations(range(RESPONSES)))
@settings(max_examples=25, deadline=None)
def test_every_loss_equals_the_loops_however_the_responses_are_laid_out(data, changes, order):
    config = learning(**changes)
    loops = functools.partial(reference.policy_loss, config=config, budget=BUDGET, weights_at=data["lp"])
    want, step = loops(**data), 1e-6
    slope = np.zeros(data["lp"].shape)
    for at in zip(*np.nonzero(data["mask"])):
        high, low = (data["lp"].astype(np.float64) for _ in range(2))
        high[at] += step
        low[at] -= step
        slope[at] = (loops(**(data | dict(lp=high))) - loops(**(data | dict(lp=low)))) / (2 * step)

    # A row each; two rows of two, in any order; and the micro-batches of a row each, added up.
    for layout in ([[i] for i in order], [order[:2], order[2:]]):
        numerator, denominator, got = _loss_and_slope(_packed(data, layout), config)
        np.testing.assert_allclose(numerator / denominator, want, rtol=1e-4, atol=2e-5)
        for r, row in enumerate(layout):
            tokens = np.concatenate([slope[i, data["mask"][i]] for i in row])
            np.testing.assert_allclose(got[r, : len(tokens)] / denominator, tokens, rtol=2e-3, atol=2e-5)
            assert not got[r, len(tokens) :].any()
    pieces = [_loss_and_slope(_packed(data, [[i]]), config) for i in order]
    total = sum(piece[0] for piece in pieces) / sum(piece[1] for piece in pieces)
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=2e-5)


# --- The update --------------------------------------------------------------------------------------------------

VOCAB, ROWS, LENGTH, TEMPERATURE, DECAY = 31, 6, 32, 0.7, 0.5
TINY = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=False
)
SEQUENCES = dict(
    ratio="gspo",
    tis="sequence",
    tis_veto=0.3,
    tis_cap=1.5,
    aggregation="seq_mean",
    entropy_coef=0.05,
    overlong_factor=0.5,
    overlong_buffer=3,
)
BY_TOKEN = dict(estimator="treepo", tis="token", tis_mode="mask", tis_cap=1.2, dual_clip=1.5, kl="k2")


@functools.lru_cache
def _model():
    return Decoder(TINY, nnx.Rngs(0))


def _learner(**changes):
    """Whose first moment after one update is half of the gradient."""
    section, optimizer = default_config().learning, agent_config().optimizer
    section.update(dict(kl_coef=0.1) | changes)
    optimizer.update(b1=DECAY, max_grad_norm=1e9)
    return Learner.create(_model(), section, optimizer, temperature=TEMPERATURE, budget=BUDGET)


def _gradient(learner, samples, forest, **how):
    batch, _ = make_batch(samples, forest, **how)
    state, metrics, _ = learner.update(learner.init(nnx.state(_model())), batch)
    gradient = [np.asarray(x) / (1 - DECAY) for x in jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))]
    return gradient, float(metrics["loss"])


def _everywhere(params, tokens):
    """log p of each token but the first and the entropy before it, [rows, LENGTH - 1], without what the learner uses:
    rows that start with the sample, whole logits."""
    model = nnx.merge(nnx.graphdef(_model()), params)
    log_p = jax.nn.log_softmax(model.logits(model(tokens))[:, :-1] / TEMPERATURE)
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)


@functools.lru_cache
def _plain_programs():
    def weighted(params, tokens, by_lp, by_entropy):
        lp, entropy = _everywhere(params, tokens)
        return (by_lp * lp + by_entropy * entropy).sum()

    return jax.jit(_everywhere), jax.jit(jax.grad(weighted))


def _gradient_of_the_loops(learner, samples, forest):
    config = learner.learning
    advantage = {}
    for key, tree in forest.items():
        raw = np.where(tree.graded, np.nan_to_num(tree.reward), 0).astype(np.float64)
        if config.overlong_factor:
            penalty = [
                reference.overlong(n, BUDGET, config.overlong_buffer, config.overlong_factor) for n in tree.length
            ]
            raw += np.where(tree.graded, penalty, 0)
        one = (x[None] for x in (raw, tree.parent, tree.agent, tree.graded))
        advantage[key] = reference.tree_advantages(*one, [0], config.estimator)[1][0]

    tokens = np.zeros((ROWS, LENGTH), np.int32)
    for i, s in enumerate(samples):
        tokens[i, : len(s.prompt) + len(s.tokens)] = np.r_[s.prompt, s.tokens]
    at = [slice(len(s.prompt) - 1, len(s.prompt) - 1 + len(s.tokens)) for s in samples]
    everywhere, weighted = _plain_programs()
    params = nnx.state(_model())
    padded = lambda parts: np.stack([np.pad(np.asarray(x, np.float64), (0, BUDGET - len(x))) for x in parts])
    lp, entropy = (padded([x[i, where] for i, where in enumerate(at)]) for x in everywhere(params, tokens))
    mask = padded([np.ones(len(s.tokens)) for s in samples]) > 0
    loops = functools.partial(
        reference.policy_loss,
        lp_old=padded([s.lp_old for s in samples]),
        lp_roll=padded([s.logprobs for s in samples]),
        lp_ref=padded([s.lp_ref for s in samples]),
        advantage=[advantage[s.tree][s.slot] for s in samples],
        mask=mask,
        config=config,
        budget=BUDGET,
        weights_at=lp,
    )
    slopes = []
    for name, x in (("lp", lp), ("entropy", entropy)):
        slope = np.zeros((ROWS, LENGTH - 1))
        for i, t in zip(*np.nonzero(mask)):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[i, t] += sign * 1e-5
                ends.append(loops(**(dict(lp=lp, entropy=entropy) | {name: moved})))
            slope[i, at[i].start + t] = (ends[0] - ends[1]) / 2e-5
        slopes.append(slope.astype(np.float32))
    gradient = [np.asarray(x) for x in jax.tree.leaves(weighted(params, tokens, *slopes))]
    return gradient, loops(lp=lp, entropy=entropy)


@st.composite
def teams(draw):
    """Two random trees, and what agent 0 wrote in them: 1 to ROWS samples. Siblings have one prompt."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forest, samples, prompts = {}, [], {}
    for key in "ab":
        reward, parent, agent, graded = draw(trees())
        length = np.where(parent >= 0, rng.integers(1, BUDGET + 1, SLOTS), 0).astype(np.int32)
        forest[key] = TreeArrays(reward, parent, agent, graded, length)
        for slot in np.nonzero(graded & (agent == 0))[0]:
            prompt = prompts.setdefault((key, parent[slot]), rng.integers(0, VOCAB, rng.integers(1, 15)))
            tokens = rng.integers(0, VOCAB, length[slot])
            lp = [rng.normal(-3.4, 0.3, len(tokens)).astype(np.float32) for _ in range(3)]
            samples.append(Sample(key, int(slot), prompt, tokens, *lp))
    assume(samples)
    return forest, samples[:ROWS]


@pytest.mark.parametrize(
    "changes", [pytest.param(SEQUENCES, id="sequences"), pytest.param(BY_TOKEN, id="by_token", marks=pytest.mark.slow)]
)
@given(team=teams(), data=st.data())
@settings(max_examples=6, deadline=None)
def test_every_update_equals_the_loops_however_it_is_cut(changes, team, data):
    forest, samples = team
    want, loss = _gradient_of_the_loops(_learner(**changes), samples, forest)
    scale = max(np.abs(x).max() for x in want)
    order = data.draw(st.permutations(range(len(samples))))
    shuffled = [samples[i] for i in order]
    whole = _gradient(_learner(**changes), samples, forest, micro_batch_size=ROWS)
    cuts = [
        whole,
        _gradient(_learner(**changes), shuffled, forest, micro_batch_size=3),
        *(
            _gradient(_learner(**changes), shuffled, forest, micro_batch_size=3, pack_tokens=48, share_prompts=share)
            for share in (False, True)
        ),
    ]
    for gradient, value in cuts:
        np.testing.assert_allclose(value, loss, rtol=1e-4, atol=1e-5)
        for a, b in zip(gradient, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * scale + 1e-7)

    # Which number an agent has among the others changes not one bit.
    names = np.array([*data.draw(st.permutations(range(3))), -1], np.int32)
    other = {key: TreeArrays(t.reward, t.parent, names[t.agent], t.graded, t.length) for key, t in forest.items()}
    renamed, value = _gradient(_learner(**changes), samples, other, micro_batch_size=ROWS)
    assert value == whole[1] and all((a == b).all() for a, b in zip(renamed, whole[0], strict=True))
