import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from ml_collections import FrozenConfigDict

from mars2_jax.config import default_config
from mars2_jax.errors import ConfigError
from mars2_jax.learning.logprobs import logprob_and_entropy
from mars2_jax.learning.loss import aggregate, clipped_objective, kl_estimate, log_ratio, policy_loss, rollout_weights
from tests.learning import reference

ROWS, WIDTH, BUDGET = 5, 6, 10


def _config(**changes):
    config = default_config().learning
    config.update(changes)
    return FrozenConfigDict(config)


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
]


@pytest.mark.parametrize("changes", _OPTIONS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_policy_loss_equals_the_loops(changes):
    config = _config(**changes)
    loss = jax.jit(lambda data: policy_loss(**data, config=config, budget=BUDGET))
    for seed in range(3):
        data = _data(seed)
        terms = loss(data)
        want = reference.policy_loss(**data, config=config, budget=BUDGET)
        np.testing.assert_allclose(terms.numerator / terms.denominator, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("changes", _OPTIONS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_gradient_of_the_policy_loss(changes):
    """Against central differences of the loops, in float64. GSPO-token puts on each token what the loops,
    which differentiate the sequence ratio, put on all tokens of a row: the two agree only where these weigh the same,
    so the rollout weights are left out there."""
    config = _config(**changes)
    if config.ratio == "gspo":
        config = _config(**(changes | dict(tis="off", tis_veto=0.0)))
    data = _data(7)

    def loss(lp):
        terms = policy_loss(**(data | dict(lp=lp)), config=config, budget=BUDGET)
        return terms.numerator / terms.denominator

    got = jax.jit(jax.grad(loss))(data["lp"])
    want, step = np.zeros((ROWS, WIDTH)), 1e-6
    for b, t in zip(*np.nonzero(data["mask"])):
        at = []
        for sign in (1, -1):
            lp = data["lp"].astype(np.float64)
            lp[b, t] += sign * step
            at.append(reference.policy_loss(**(data | dict(lp=lp)), config=config, budget=BUDGET))
        want[b, t] = (at[0] - at[1]) / (2 * step)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def test_only_lp_and_entropy_have_a_gradient():
    data, config = _data(1), _config(tis="token", entropy_coef=0.1)

    def loss(part):
        return policy_loss(**(data | part), config=config, budget=BUDGET).numerator

    others = {k: data[k] for k in ("lp", "entropy", "lp_roll")}
    gradient = jax.grad(loss)(others)
    assert np.any(gradient["lp"]) and np.any(gradient["entropy"])
    assert not np.any(gradient["lp_roll"])


def test_gspo_is_the_gradient_of_the_sequence_ratio():
    data = _data(3)

    def token(lp):
        ratio = jnp.exp(log_ratio(lp, data["lp_old"], data["mask"], "gspo"))
        return aggregate(ratio, data["mask"], "seq_mean", budget=BUDGET)[0]

    def sequence(lp):
        difference = jnp.where(data["mask"], lp - data["lp_old"], 0)
        length = data["mask"].sum(-1)
        return jnp.where(length > 0, jnp.exp(difference.sum(-1) / jnp.maximum(length, 1)), 0).sum()

    np.testing.assert_allclose(token(data["lp"]), sequence(data["lp"]), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(token)(data["lp"]), jax.grad(sequence)(data["lp"]), rtol=1e-5, atol=1e-7)


def test_clip_higher_and_dual_clip_by_hand():
    ratio = np.log(np.array([[0.5, 0.9, 1.25, 1.4, 5.0]], np.float32))
    up = clipped_objective(ratio, np.ones((1, 1)), clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(up.objective, [[0.5, 0.9, 1.25, 1.28, 1.28]], rtol=1e-6)
    assert up.clipped.tolist() == [[False, False, False, True, True]]
    down = clipped_objective(ratio, -np.ones((1, 1)), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    np.testing.assert_allclose(down.objective, [[-0.8, -0.9, -1.25, -1.4, -3.0]], rtol=1e-6)
    assert down.clipped.tolist() == [[True, False, False, False, True]]


def test_rollout_weights_by_hand():
    gap = np.log(np.array([[4.0, 0.5, 1.0, 9.0], [1e-5, 1.0, 1.0, 1.0]], np.float32))
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)

    def weights(**options):
        return np.asarray(rollout_weights(gap, np.zeros_like(gap), mask, **({"cap": 2.0} | options)))

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


def test_a_huge_ratio_stays_finite():
    data = _data(0) | dict(advantage=np.zeros(ROWS, np.float32), lp=np.full((ROWS, WIDTH), 200, np.float32))
    terms = policy_loss(**data, config=_config(tis="sequence"), budget=BUDGET)
    assert np.isfinite(terms.numerator)


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean", "seq_mean_token_sum_norm"])
def test_splitting_rows_adds_numerators_and_denominators(kind):
    data = _data(4)
    values, mask = data["entropy"], data["mask"]
    whole = aggregate(values, mask, kind, budget=BUDGET)
    parts = [aggregate(values[s], mask[s], kind, budget=BUDGET) for s in (slice(0, 2), slice(2, 3), slice(3, 5))]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)
    wider = aggregate(np.pad(values, ((0, 1), (0, 4))), np.pad(mask, ((0, 1), (0, 4))), kind, budget=BUDGET)
    np.testing.assert_allclose(wider, whole, rtol=1e-6)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logprob_and_entropy_equal_log_softmax(entropy_gradient):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (3, 4, 11)).astype(np.float32)
    target = rng.integers(0, 11, (3, 4))
    lp, entropy = logprob_and_entropy(logits, target, entropy_gradient)
    log_p = reference.log_softmax(logits)
    np.testing.assert_allclose(lp, np.take_along_axis(log_p, target[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)

    weight = rng.normal(size=(2, 3, 4))

    def loss(logits):
        lp, entropy = logprob_and_entropy(logits, target, entropy_gradient)
        return (weight[0] * lp + (weight[1] * entropy if entropy_gradient else 0)).sum()

    with jax.enable_x64(True):
        check_grads(loss, (logits.astype(np.float64),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    if not entropy_gradient:
        assert not np.any(jax.grad(lambda x: logprob_and_entropy(x, target)[1].sum())(logits))


@pytest.mark.parametrize(
    "changes, name",
    [
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
        policy_loss(**_data(0), config=_config(**changes), budget=BUDGET)


def test_a_kl_term_needs_a_reference():
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(**(_data(0) | dict(lp_ref=None)), config=_config(), budget=BUDGET)
