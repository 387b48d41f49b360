import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars2_jax.errors import ConfigError
from mars2_jax.learning.advantage import tree_advantages
from mars2_jax.learning.loss import (
    aggregate,
    cispo_objective,
    clipped_objective,
    kl_estimate,
    log_ratio,
    policy_loss,
    response_kl,
    rollout_weights,
)
from tests.learning import reference
from tests.learning.forests import GOLDEN
from tests.learning.forests import learning as _config

ROWS, WIDTH, BUDGET = 5, 6, 10


def _data(seed):
    """Ragged rows, one of them empty; ratios well inside and outside every clip range; garbage where masked."""
    rng = np.random.default_rng(seed)
    lengths = np.array([6, 3, 0, 1, 5])
    mask = np.arange(WIDTH) < lengths[:, None]
    lp = rng.normal(-2, 0.5, (ROWS, WIDTH))
    data = dict(
        lp=lp,
        entropy=rng.uniform(0, 3, (ROWS, WIDTH)),
        lp_old=lp + rng.normal(0, 0.4, (ROWS, WIDTH)),
        lp_roll=lp + rng.normal(0, 0.5, (ROWS, WIDTH)),
        lp_ref=lp + rng.normal(0, 0.5, (ROWS, WIDTH)),
    )
    data = {name: np.where(mask, x, 50.0).astype(np.float32) for name, x in data.items()}
    return data | dict(advantage=np.array([1.5, -0.8, 2.0, 0.0, -1.7], np.float32), mask=mask)


def _rows(data):
    """The arguments of `policy_loss`, with a row for each response."""
    rows = dict(data)
    return rows | dict(member=rows.pop("mask")[:, None], advantage=data["advantage"][:, None])


def _packed(data):
    """The same, with the responses packed into two rows of three, the last of them empty."""
    layout, width = [[4, 1, 2], [3, 0]], 11
    packed = {name: np.full((2, width), 50, np.float32) for name in ("lp", "entropy", "lp_old", "lp_roll", "lp_ref")}
    member, advantage = np.zeros((2, 3, width), bool), np.zeros((2, 3), np.float32)
    for r, row in enumerate(layout):
        start = 0
        for s, i in enumerate(row):
            end = start + data["mask"][i].sum()
            for name, array in packed.items():
                array[r, start:end] = data[name][i, data["mask"][i]]
            member[r, s, start:end], advantage[r, s], start = True, data["advantage"][i], end
    return packed | dict(member=member, advantage=advantage)


_OPTIONS = [
    *(
        dict(ratio=ratio, aggregation=aggregation, dual_clip=dual, kl=kl, kl_coef=0.1)
        for ratio, aggregation, (dual, kl) in itertools.product(
            ["ppo", "gspo"],
            ["token_mean", "seq_mean", "seq_mean_token_sum_norm"],
            [(0.0, "k1"), (1.4, "k2"), (3.0, "k3")],
        )
    ),
    *(
        dict(ratio="gspo", tis=level, tis_mode=mode, tis_cap=1.2, tis_veto=veto, kl_coef=0.0)
        for level, mode, veto in itertools.product(["token", "sequence", "geometric"], ["truncate", "mask"], [0.0, 0.6])
    ),
    dict(entropy_coef=0.3),
    dict(clip_low=0.0, clip_high=0.0),
    dict(objective="cispo", clip_low=0.3, aggregation="seq_mean"),
    dict(objective="cispo", clip_low=1.0, tis="token", tis_cap=1.2),
    dict(kl_in="reward", kl_coef=0.5),
]


@pytest.mark.parametrize("changes", _OPTIONS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_policy_loss_equals_the_loops_packed_or_not(changes):
    config = _config(**changes)
    loss = jax.jit(lambda data: policy_loss(**data, config=config, budget=BUDGET))
    for seed in range(3):
        data = _data(seed)
        terms, packed = loss(_rows(data)), loss(_packed(data))
        want = reference.policy_loss(**data, config=config, budget=BUDGET)
        np.testing.assert_allclose(terms.numerator / terms.denominator, want, rtol=2e-5, atol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), packed, terms)


@pytest.mark.parametrize("changes", _OPTIONS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_gradient_of_the_policy_loss(changes):
    """Against central differences of the loops, in float64."""
    config = _config(**changes)
    data = _data(7)

    def loss(lp):
        terms = policy_loss(**(_rows(data) | dict(lp=lp)), config=config, budget=BUDGET)
        return terms.numerator / terms.denominator

    got = jax.jit(jax.grad(loss))(data["lp"])
    want, step = np.zeros((ROWS, WIDTH)), 1e-6
    for b, t in zip(*np.nonzero(data["mask"])):
        at = []
        for sign in (1, -1):
            lp = data["lp"].astype(np.float64)
            lp[b, t] += sign * step
            values = data | dict(lp=lp)
            at.append(reference.policy_loss(**values, config=config, budget=BUDGET, weights_at=data["lp"]))
        want[b, t] = (at[0] - at[1]) / (2 * step)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def test_only_lp_and_entropy_have_a_gradient():
    data, config = _rows(_data(1)), _config(tis="token", entropy_coef=0.1)

    def loss(part):
        return policy_loss(**(data | part), config=config, budget=BUDGET).numerator

    others = {k: data[k] for k in ("lp", "entropy", "lp_roll")}
    gradient = jax.grad(loss)(others)
    assert np.any(gradient["lp"]) and np.any(gradient["entropy"])
    assert not np.any(gradient["lp_roll"])


def test_gspo_is_the_gradient_of_the_sequence_ratio():
    data = _data(3)
    member = data["mask"][:, None]

    def token(lp):
        ratio = jnp.exp(log_ratio(lp, data["lp_old"], member, "gspo"))
        return aggregate(ratio, member, "seq_mean", budget=BUDGET)[0]

    def sequence(lp):
        difference = jnp.where(data["mask"], lp - data["lp_old"], 0)
        length = data["mask"].sum(-1)
        return jnp.where(length > 0, jnp.exp(difference.sum(-1) / jnp.maximum(length, 1)), 0).sum()

    np.testing.assert_allclose(token(data["lp"]), sequence(data["lp"]), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(token)(data["lp"]), jax.grad(sequence)(data["lp"]), rtol=1e-5, atol=1e-7)


def test_clip_higher_and_dual_clip_by_hand():
    ratio = np.log(np.array([[0.5, 0.9, 1.25, 1.4, 5.0]], np.float32))
    up = clipped_objective(ratio, np.ones((1, 1)), clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(up.value, [[0.5, 0.9, 1.25, 1.28, 1.28]], rtol=1e-6)
    assert up.clipped.tolist() == [[False, False, False, True, True]]
    down = clipped_objective(ratio, -np.ones((1, 1)), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    np.testing.assert_allclose(down.value, [[-0.8, -0.9, -1.25, -1.4, -3.0]], rtol=1e-6)
    assert down.clipped.tolist() == [[True, False, False, False, True]]


def test_cispo_by_hand():
    lp = np.log(np.array([[0.5, 0.9, 1.25, 1.4, 5.0]], np.float32))  # of weights that had 1: the ratio itself
    options = dict(clip_low=0.2, clip_high=0.28)
    got = cispo_objective(lp, lp, -2 * np.ones((1, 5)), **options)
    weight = np.array([[0.8, 0.9, 1.25, 1.28, 1.28]])
    np.testing.assert_allclose(got.value, -2 * weight * lp, rtol=1e-6)
    assert got.clipped.tolist() == [[True, False, False, True, True]]
    # Clipped tokens keep a gradient, that of lp.
    slope = jax.grad(lambda x: cispo_objective(x, x, -2 * np.ones((1, 5)), **options).value.sum())(lp)
    np.testing.assert_allclose(slope, -2 * weight, rtol=1e-6)


# On the tree of `forests`, agent 0 wrote slots 1, 5 and 7; by rloo their advantages are 1/2, 1/2 and -2/3. With these
# ratios of their tokens J is, with the clip at 0.8 and 1.28:
#   1: 1.5 -> min(0.75, 0.64) = 0.64;  0.5 -> min(0.25, 0.4) = 0.25      5: 0.5 -> 0.25
#   7: 0.5 -> min(-1/3, -0.8 · 2/3) = -0.533333;  1 -> -0.666667
GOLDEN_RATIOS = {1: [1.5, 0.5], 5: [0.5], 7: [0.5, 1.0]}
GOLDEN_LOSSES = [
    # -(0.64 + 0.25 + 0.25 - 0.533333 - 0.666667)/5
    (dict(), 0.012),
    # -(0.445 + 0.25 - 0.6)/3
    (dict(aggregation="seq_mean"), -0.0316667),
    # -(0.89 + 0.25 - 1.2)/10/3
    (dict(aggregation="seq_mean_token_sum_norm"), 0.002),
    # s = √0.75, 0.5, √0.5: J of each of their tokens 0.433013, 0.25, min(-0.471405, -0.533333)
    (dict(ratio="gspo"), -(2 * 0.433013 + 0.25 - 2 * 0.533333) / 5),
    (dict(ratio="gspo", aggregation="seq_mean"), -(0.433013 + 0.25 - 0.533333) / 3),
    # Bounded weight · A · lp, lp = log ratio - 1: 1.28 · 0.5 · -0.594535, 0.8 · 0.5 · -1.693147 twice,
    # 0.8 · -2/3 · -1.693147, 1 · -2/3 · -1
    (dict(objective="cispo"), -(-0.380502 - 0.677259 - 0.677259 + 0.903012 + 0.666667) / 5),
    # The reference is twice as sure of every token: d = log 2.
    (dict(kl="k1", kl_coef=0.1), 0.012 - 0.0693147),
    (dict(kl="k2", kl_coef=0.1), 0.012 + 0.0240227),
    (dict(kl="k3", kl_coef=0.1), 0.012 + 0.0306853),
    # Slot 5 was sampled at a third of the trainer's probability: its 0.25 counts 3 times, bounded by 2, or not at all.
    (dict(tis="token"), -(0.64 + 0.25 + 0.5 - 1.2) / 5),
    (dict(tis="token", tis_mode="mask"), -(0.64 + 0.25 - 1.2) / 5),
    (dict(tis="token", tis_cap=4.0), -(0.64 + 0.25 + 0.75 - 1.2) / 5),
    # Entropies of 0.5 each.
    (dict(entropy_coef=0.2), 0.012 - 0.1),
]


@pytest.mark.parametrize("changes, want", GOLDEN_LOSSES)
def test_golden_losses(changes, want):
    config = _config(**(dict(estimator="rloo", kl_coef=0.0) | changes))
    slots = list(GOLDEN_RATIOS)
    advantage = np.asarray(tree_advantages(*GOLDEN, config).advantage)[slots, None]
    np.testing.assert_allclose(advantage[:, 0], [1 / 2, 1 / 2, -2 / 3], atol=1e-6)
    member = np.array([[True, True], [True, False], [True, True]])[:, None]
    log_ratios = np.log([np.resize(GOLDEN_RATIOS[slot], 2) for slot in slots]).astype(np.float32)
    old = np.full((3, 2), -1, np.float32)
    terms = policy_loss(
        old + log_ratios,
        np.full((3, 2), 0.5, np.float32),
        lp_old=old,
        lp_roll=old - np.log([[1], [3], [1]]).astype(np.float32),
        lp_ref=old + log_ratios + np.float32(math.log(2)),
        advantage=advantage,
        member=member,
        config=config,
        budget=BUDGET,
    )
    np.testing.assert_allclose(terms.numerator / terms.denominator, want, atol=2e-6)


def test_rollout_weights_by_hand():
    gap = np.log(np.array([[4.0, 0.5, 1.0, 9.0], [1e-5, 1.0, 1.0, 1.0]], np.float32))
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)

    def weights(**options):
        return np.asarray(rollout_weights(gap, np.zeros_like(gap), mask[:, None], **({"cap": 2.0} | options)))

    np.testing.assert_allclose(weights(level="token")[0, :3], [2, 0.5, 1], rtol=1e-6)
    np.testing.assert_allclose(weights(level="token", mode="mask")[0, :3], [0, 0.5, 1], rtol=1e-6)
    np.testing.assert_allclose(weights(level="sequence")[0, :3], 2, rtol=1e-6)
    np.testing.assert_allclose(weights(level="geometric")[0, :3], 2 ** (1 / 3), rtol=1e-6)
    np.testing.assert_allclose(weights(level="token", veto=1e-4)[:, :2], [[2, 0.5], [0, 0]], rtol=1e-6)


def test_k3_is_never_negative_and_exact_near_zero():
    d = np.array([[0.0, 1e-4, -1e-4, 1e-3, -2.0, 3.0]], np.float32)
    k3 = np.asarray(kl_estimate(np.zeros_like(d), d, "k3"))
    assert (k3 >= 0).all()
    exact = [0 if x == 0 else math.expm1(float(x)) - float(x) for x in d[0]]
    np.testing.assert_allclose(k3[0], exact, rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_of_a_response_is_the_sum_over_its_tokens(kind):
    rng = np.random.default_rng(0)
    lps = [[rng.normal(-2, 1, n).astype(np.float32) for n in (3, 1, 700, 600)] for _ in range(2)]
    want = [reference.response_kl(lp, ref, kind) for lp, ref in zip(*lps)]
    np.testing.assert_allclose(response_kl(*lps, kind), want, rtol=1e-5)
    assert response_kl([], [], kind) == []


def test_a_huge_ratio_stays_finite():
    data = _rows(_data(0)) | dict(advantage=np.zeros((ROWS, 1), np.float32), lp=np.full((ROWS, WIDTH), 200, np.float32))
    terms = policy_loss(**data, config=_config(tis="sequence"), budget=BUDGET)
    assert np.isfinite(terms.numerator)


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean", "seq_mean_token_sum_norm"])
def test_splitting_rows_adds_numerators_and_denominators(kind):
    data = _data(4)
    values, mask = data["entropy"], data["mask"][:, None]
    whole = aggregate(values, mask, kind, budget=BUDGET)
    parts = [aggregate(values[s], mask[s], kind, budget=BUDGET) for s in (slice(0, 2), slice(2, 3), slice(3, 5))]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)
    wider = aggregate(np.pad(values, ((0, 1), (0, 4))), np.pad(mask, ((0, 1), (0, 0), (0, 4))), kind, budget=BUDGET)
    np.testing.assert_allclose(wider, whole, rtol=1e-6)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"objective": "ppo"}, "learning.objective"),
        ({"ratio": "trpo"}, "learning.ratio"),
        ({"kl": "k4"}, "learning.kl"),
        ({"tis": "word"}, "learning.tis"),
        ({"tis": "token", "tis_mode": "drop"}, "learning.tis_mode"),
        ({"tis_veto": 0.1}, "learning.tis_veto"),
        ({"aggregation": "sum"}, "learning.aggregation"),
        ({"dual_clip": 1.1}, "learning.dual_clip"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_it(changes, name):
    with pytest.raises(ConfigError, match=name):
        policy_loss(**_rows(_data(0)), config=_config(**changes), budget=BUDGET)


def test_a_kl_term_needs_a_reference():
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(**(_rows(_data(0)) | dict(lp_ref=None)), config=_config(), budget=BUDGET)
