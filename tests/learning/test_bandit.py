"""Learning is real: a tiny model is given two-token answers to find, through the very update that training makes.

The model draws two tokens; the reward is 1 if their sum is even, which it is for half of the answers. A search tree of
eight such attempts has random parents, two agents by name, and one model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.config import agent_config, default_config
from mars2_jax.learning.advantage import ESTIMATORS
from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.learning.update import Learner
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder

ARMS, TREES, NODES, UPDATES = 8, 4, 8, 40
BANDIT = ModelConfig(
    vocab_size=ARMS, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=True
)
PROMPT = np.array([3, 1])
PAYS = (np.arange(ARMS)[:, None] + np.arange(ARMS)) % 2 == 0
"""Whether the response (a, b) pays."""


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(graphdef, params):
    """log p(a | PROMPT) and log p(b | PROMPT, a), [ARMS] and [ARMS, ARMS]."""
    model = nnx.merge(graphdef, params)
    rows = jnp.concatenate([jnp.tile(PROMPT, (ARMS, 1)), jnp.arange(ARMS)[:, None]], axis=1)
    log_p = jax.nn.log_softmax(model.logits(model(rows)))
    return log_p[0, len(PROMPT) - 1], log_p[:, len(PROMPT)]


def _learner(changes, optimizer):
    learning, settings = default_config().learning, agent_config().optimizer
    learning.update(changes)
    settings.update(dict(learning_rate=1e-2) | optimizer)
    model = Decoder(BANDIT, nnx.Rngs(0))
    return Learner.create(model, learning, settings, temperature=1.0, budget=2)


def _expected_rewards(learner, seed, sign=1.0):
    """Of each of the policies, from the first to the last; `sign` -1 pays for the wrong answers."""
    rng = np.random.default_rng(seed)
    start = nnx.state(Decoder(BANDIT, nnx.Rngs(seed)))
    state = learner.init(start)
    reference = jax.device_get(_log_probabilities(learner.graphdef, start))
    expected = []
    for _ in range(UPDATES + 1):
        first, second = jax.device_get(_log_probabilities(learner.graphdef, state.params))
        p = np.exp(np.asarray(first, np.float64)[:, None] + second).ravel()
        expected.append(p[PAYS.ravel()].sum() / p.sum())
        trees, samples = {}, []
        for tree in range(TREES):
            pairs = rng.choice(ARMS * ARMS, NODES, p=p / p.sum())
            a, b = pairs // ARMS, pairs % ARMS
            old = np.stack([first[a], second[a, b]], 1)
            ref = np.stack([reference[0][a], reference[1][a, b]], 1)
            kl = np.r_[0, (old - ref).sum(1)].astype(np.float32)
            trees[tree] = TreeArrays(
                reward=np.r_[0, sign * PAYS[a, b]].astype(np.float32),
                parent=np.array([-1] + [rng.integers(0, v) for v in range(1, NODES + 1)], np.int32),
                agent=np.array([-1] + [0, 1] * (NODES // 2), np.int32),
                graded=np.arange(NODES + 1) > 0,
                length=np.array([0] + [2] * NODES, np.int32),
                problem="the only one",
                kl=kl if learner.learning.kl_in == "reward" else None,
            )
            answers = np.stack([a, b], 1).astype(np.int32)
            samples += [Sample(tree, n + 1, PROMPT, answers[n], old[n], old[n], ref[n]) for n in range(NODES)]
        batch, _ = make_batch(samples, trees, micro_batch_size=16, pack_tokens=learner.learning.pack_tokens)
        state, _, _ = learner.update(state, batch)
    return expected


CHANGES = {name: dict(estimator=name) for name in ESTIMATORS} | {
    "mars2_plus": dict(ratio="gspo", tis="token", overlong_buffer=1, overlong_factor=0.1),
    "cispo": dict(objective="cispo", pack_tokens=32),
}
MORE = {
    "by agent": dict(estimator="grpo", baseline="leave_one_out", group="tree_agent"),
    "kl in reward": dict(kl_in="reward", kl="k1", kl_coef=0.05),
    "dr_grpo": dict(estimator="grpo", scale="none", aggregation="seq_mean_token_sum_norm"),
}
CASES = [pytest.param(changes, {}, id=name) for name, changes in CHANGES.items()] + [
    pytest.param(changes, {}, id=name, marks=pytest.mark.slow) for name, changes in MORE.items()
]
CASES += [pytest.param({}, dict(name=name), id=name, marks=pytest.mark.slow) for name in ("adafactor", "muon")]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("changes, optimizer", CASES)
def test_updates_raise_the_expected_reward(changes, optimizer):
    """From one half to above 0.9."""
    learner = _learner(changes, optimizer)
    for seed in range(5):
        expected = _expected_rewards(learner, seed)
        assert 0.35 < expected[0] < 0.65
        assert expected[-1] > 0.9, (seed, expected)


@pytest.mark.usefixtures("quick_compiles")
def test_a_wrong_sign_would_be_seen():
    assert _expected_rewards(_learner(dict(estimator="grpo"), {}), 0, sign=-1.0)[-1] < 0.6
