"""One update of one agent: a forest and token rows in, new weights and metrics out, in one compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.learning.advantage import TreeAdvantages, overlong_penalty, tree_advantages
from mars2_jax.learning.batch import Rows, SampleRows, TreeBatch, make_rows
from mars2_jax.learning.logprobs import response_logprobs
from mars2_jax.learning.loss import PolicyTerms, policy_loss
from mars2_jax.models.decoder import Decoder

__all__ = ["Learner", "Metrics", "TrainState", "make_optimizer"]

Metrics = dict[str, Float[Array, ""]]


def _decayed(params: nnx.State) -> Any:
    """Which weights decay: matrices. A bias may have several axes, so its name decides."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim >= 2 and "bias" not in jax.tree_util.keystr(path), params
    )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW with a linear warm-up to a constant learning rate.

    Update number i (from 0) of a warm-up of w has the rate `learning_rate * min((i + 1) / w, 1)`: none is lost at rate
    0. Weight decay applies to matrices, not to norms and biases.

    Args:
      config: the `optimizer` section of an agent.
    """

    def rate(count: Int[Array, ""]) -> Float[Array, ""]:
        return config.learning_rate * jnp.minimum((count + 1) / max(config.warmup_updates, 1), 1.0)

    adamw = optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that an agent's learning carries from one update to the next.

    Attributes:
      params: float32 master weights; of an agent with adapters, those alone.
      opt_state: the optimizer's.
      step: updates made.
    """

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Learner:
    """What an agent's update is made of, without its weights.

    What is learned is `params`: all weights, or adapters over a `base` of frozen weights, which every call is then
    given too. The base is read where it lies, in the type it has, and may be shared.

    Hashable, and the static argument of the compiled programs: agents of one architecture and one configuration share
    their compilations.

    Attributes:
      graphdef: structure of the decoder.
      learning: the `learning` section of the config.
      optimizer: the `optimizer` section of the agent.
      temperature: that of the sampler; log-probabilities are taken at it.
      budget: most tokens a response may have.
    """

    graphdef: nnx.GraphDef[Decoder]
    learning: FrozenConfigDict
    optimizer: FrozenConfigDict
    temperature: float
    budget: int

    @classmethod
    def create(
        cls, model: Decoder, learning: ConfigDict, optimizer: ConfigDict, *, temperature: float, budget: int
    ) -> Learner:
        """The learner for agents that have the architecture of `model`.

        Raises:
          ConfigError: a temperature at which nothing is sampled, or options that do not go together.
        """
        if temperature <= 0:
            raise ConfigError(f"rollout.temperature={temperature} must be above 0 to train: greedy text has no ratio")
        # Fails on a bad buffer now, not at the first update. Only traced: the mesh in context may be of devices that
        # this process compiles for and does not have.
        penalty = functools.partial(
            overlong_penalty, budget=budget, buffer=learning.overlong_buffer, factor=learning.overlong_factor
        )
        jax.eval_shape(penalty, jax.ShapeDtypeStruct((1,), jnp.int32))
        return cls(
            nnx.graphdef(model), FrozenConfigDict(learning), FrozenConfigDict(optimizer), float(temperature), budget
        )

    def init(self, params: nnx.State) -> TrainState:
        """The state before the first update. The weights are copied: updates donate the state, and the weights that
        came in stay valid (for other agents, for one)."""
        state = self._fresh(params)
        return jax.tree.map(jax.device_put, state, _shardings(state))

    def abstract(self, params: nnx.State) -> TrainState:
        """Shapes, types and shardings of what `init` would return; nothing is computed. `params` may be abstract."""
        shape = jax.eval_shape(self._fresh, params)
        placed = lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding)
        shape = dataclasses.replace(shape, params=jax.tree.map(placed, shape.params, params))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shape, _shardings(shape)
        )

    def _fresh(self, params: nnx.State) -> TrainState:
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return TrainState(params, make_optimizer(self.optimizer).init(params), jnp.zeros((), jnp.int32))

    def score(self, params: nnx.State, rows: Rows, base: nnx.State | None = None) -> Float[Array, "rows response"]:
        """Log-probability of every response token at the sampling temperature; 0 where masked."""
        return _score(self, params, rows, base)

    def score_responses(
        self,
        params: nnx.State,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        base: nnx.State | None = None,
        *,
        longest: int | None = None,
    ) -> list[np.ndarray]:
        """Log-probabilities float32[R] of each response given its prompt: `lp_old` and `lp_ref` of a sample.

        Rows of like length are scored together, a micro-batch a call; the results come in the order of the arguments.
        `longest` as in `make_rows`.
        """
        size = self.learning.micro_batch_size
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]) + len(responses[i]), i))
        scores: list[np.ndarray] = [np.empty(0, np.float32)] * len(prompts)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            few = [prompts[i] for i in chosen], [responses[i] for i in chosen]
            rows = make_rows(*few, rows=size, longest=longest)
            lp = np.asarray(self.score(params, rows, base))
            for row, i in enumerate(chosen):
                scores[i] = lp[row, : len(responses[i])]
        return scores

    def update(
        self, state: TrainState, batch: TreeBatch, base: nnx.State | None = None
    ) -> tuple[TrainState, Metrics, TreeAdvantages]:
        """Makes one update. The arrays of `state` are donated and must not be used again; those of `base` are not.

        Returns:
          The new state; metrics, float32 scalars; and [trees, nodes] arrays of the rewards and advantages used.

        Metrics over the sampled tokens: `kl` (the configured estimate; 0 without a reference), `entropy`,
        `clip_fraction`, `ratio`, `rollout_weight`, `logprob_gap` (mean |lp_old - lp_roll|). Over the rows:
        `reward_mean` (raw), `advantage_mean`, `advantage_std`, `nodes`, `tokens`. Over the trees:
        `zero_advantage_trees`, the share of them that teaches nothing. `loss`, and `grad_norm` before clipping.
        """
        return self.program(state)(state, batch, base)

    def program(self, state: TrainState) -> Any:
        """The compiled update, (state, batch, base) -> what `update` returns, for states that lie where this one does.

        `state` may be abstract; `.lower(state, batch, base)` then compiles ahead of time. The new state lies where the
        old one did: left to the compiler, a weight could come back in another place, and the next call would compile
        again.
        """
        leaves, structure = jax.tree.flatten(state)
        return _program(self, structure, tuple(x.sharding for x in leaves))


def _shardings(state: TrainState) -> TrainState:
    """Where each array of a state, or of its shapes, lies: the optimizer's moments beside their weights, counts
    on every device. The weights have shardings."""
    weights = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    whole = next(iter(weights.values())).sharding
    if isinstance(whole, NamedSharding):
        whole = NamedSharding(whole.mesh, PartitionSpec())

    def place(path: Any, x: Any) -> Sharding:
        for start in range(len(path)):
            weight = weights.get(jax.tree_util.keystr(path[start:]))
            if weight is not None and weight.shape == x.shape:
                return weight.sharding
        return whole

    return jax.tree_util.tree_map_with_path(place, state)


def _merge(learner: Learner, params: nnx.State, base: nnx.State | None) -> Decoder:
    return nnx.merge(learner.graphdef, params, *([] if base is None else [base]))


@functools.partial(jax.jit, static_argnums=0)
def _score(learner: Learner, params: nnx.State, rows: Rows, base: nnx.State | None) -> Float[Array, "rows response"]:
    lp, _ = response_logprobs(
        _merge(learner, params, base),
        rows.tokens,
        rows.prompt_length,
        rows.mask.shape[-1],
        temperature=learner.temperature,
        scan_unroll=learner.learning.scan_unroll,
    )
    return jnp.where(rows.mask, lp, 0.0)


def _loss(
    learner: Learner,
    params: nnx.State,
    samples: SampleRows,
    advantage: Float[Array, " rows"],
    base: nnx.State | None,
) -> tuple[Float[Array, ""], PolicyTerms]:
    """The loss terms of one micro-batch (`samples` without the micro axis), numerator first for differentiation."""
    lp, entropy = response_logprobs(
        _merge(learner, params, base),
        samples.rows.tokens,
        samples.rows.prompt_length,
        samples.rows.mask.shape[-1],
        temperature=learner.temperature,
        remat=learner.learning.remat,
        scan_unroll=learner.learning.scan_unroll,
        entropy_gradient=bool(learner.learning.entropy_coef),
    )
    terms = policy_loss(
        lp,
        entropy,
        lp_old=samples.lp_old,
        lp_roll=samples.lp_roll,
        lp_ref=samples.lp_ref,
        advantage=advantage,
        mask=samples.rows.mask,
        config=learner.learning,
        budget=learner.budget,
    )
    return terms.numerator, terms


@functools.cache
def _program(learner: Learner, structure: Any, shardings: tuple[Sharding, ...]) -> Any:
    placement = jax.tree.unflatten(structure, shardings)
    return jax.jit(
        functools.partial(_update, learner),
        donate_argnums=0,
        in_shardings=(placement, None, None),
        out_shardings=(placement, None, None),
    )


def _update(
    learner: Learner, state: TrainState, batch: TreeBatch, base: nnx.State | None
) -> tuple[TrainState, Metrics, TreeAdvantages]:
    config, samples = learner.learning, batch.samples
    penalty = overlong_penalty(
        batch.length, budget=learner.budget, buffer=config.overlong_buffer, factor=config.overlong_factor
    )
    trees = tree_advantages(batch.reward + penalty, batch.parent, batch.agent, batch.graded, config)
    advantage = trees.advantage[samples.tree, samples.slot]

    # Σ gradients, in float32 as the weights are, divided once by Σ denominators.
    def accumulate(total, micro):
        gradient, terms = jax.grad(functools.partial(_loss, learner), has_aux=True)(state.params, *micro, base)
        return jax.tree.map(jnp.add, total, gradient), terms

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    gradient, terms = jax.lax.scan(accumulate, zeros, (samples, advantage))
    terms = jax.tree.map(lambda x: x.sum(0), terms)
    gradient = jax.tree.map(lambda g: g / terms.denominator, gradient)

    changes, opt_state = make_optimizer(learner.optimizer).update(gradient, state.opt_state, state.params)
    new_state = TrainState(optax.apply_updates(state.params, changes), opt_state, state.step + 1)

    tokens = terms.sums["tokens"]
    nodes = samples.valid.sum()

    def row_mean(x: Float[Array, "micro rows"]) -> Float[Array, ""]:
        return jnp.where(samples.valid, x, 0.0).sum() / nodes

    mean = row_mean(advantage)
    alive = batch.graded.any(-1)
    metrics = {name: total / tokens for name, total in terms.sums.items() if name != "tokens"} | {
        "loss": terms.numerator / terms.denominator,
        "grad_norm": optax.tree.norm(gradient),
        "reward_mean": row_mean(batch.reward[samples.tree, samples.slot]),
        "advantage_mean": mean,
        "advantage_std": jnp.sqrt(row_mean((advantage - mean) ** 2)),
        "zero_advantage_trees": (alive & (trees.advantage == 0).all(-1)).sum() / alive.sum(),
        "nodes": nodes.astype(jnp.float32),
        "tokens": tokens,
    }
    return new_state, metrics, trees
