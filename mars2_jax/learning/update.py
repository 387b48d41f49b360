"""One update of one agent: a forest and token rows in, new weights and metrics out, in one compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.learning.accumulate import sum_gradients
from mars2_jax.learning.advantage import TreeAdvantages, response_advantages
from mars2_jax.learning.batch import SampleRows, TreeBatch
from mars2_jax.learning.logprobs import response_logprobs
from mars2_jax.learning.loss import Member, PolicyTerms, policy_loss
from mars2_jax.learning.optimizer import in_host_memory, make_optimizer, state_shardings
from mars2_jax.learning.rewards import overlong_penalty
from mars2_jax.learning.rows import Rows, make_rows, pack, packed_length
from mars2_jax.models.causal_attention import shares_prefixes
from mars2_jax.models.decoder import Decoder
from mars2_jax.parallel.exchange import to_host

__all__ = ["Learner", "Metrics", "TrainState", "descend", "step_program"]

Metrics = dict[str, Float[Array, ""]]


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
      share_prompts: whether packed samples with equal prompts have it once a row: wherever the attention can.
    """

    graphdef: nnx.GraphDef[Decoder]
    learning: FrozenConfigDict
    optimizer: FrozenConfigDict
    temperature: float
    budget: int
    share_prompts: bool

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
            nnx.graphdef(model),
            FrozenConfigDict(learning),
            FrozenConfigDict(optimizer),
            float(temperature),
            budget,
            share_prompts=bool(learning.pack_tokens) and shares_prefixes(model.attention),
        )

    def init(self, params: nnx.State) -> TrainState:
        """The state before the first update. The weights are copied: updates donate the state, and the weights that
        came in stay valid (for other agents, for one)."""
        state = self._fresh(params)
        return jax.tree.map(jax.device_put, state, self._places(state))

    def abstract(self, params: nnx.State) -> TrainState:
        """Shapes, types and shardings of what `init` would return; nothing is computed. `params` may be abstract."""
        shape = jax.eval_shape(self._fresh, params)
        placed = lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding)
        shape = dataclasses.replace(shape, params=jax.tree.map(placed, shape.params, params))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shape,
            self._places(shape),
        )

    def _places(self, state: TrainState) -> TrainState:
        """Where the arrays of a state lie between updates, as shardings; `state` may be abstract."""
        places, offload = state_shardings(state.params, state), self.optimizer.offload
        if offload != "none":
            places = dataclasses.replace(places, opt_state=in_host_memory(state.opt_state, places.opt_state))
        if offload == "all":
            places = dataclasses.replace(places, params=in_host_memory(state.params, places.params))
        return places

    def on_devices(self, params: nnx.State) -> nnx.State:
        """The weights of a state, where they can be computed with: a copy of those that lie in host memory, else
        themselves, which the next update donates."""
        if self.optimizer.offload != "all":
            return params
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), params)

    def decoder(self, params: nnx.State, base: nnx.State | None = None) -> Decoder:
        """The decoder with these weights; `params` are adapters where there is a base."""
        return nnx.merge(self.graphdef, params, *([] if base is None else [base]))

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

        A micro-batch is scored a call: of rows of like length, or of packed rows. The results come in the order of the
        arguments. `longest` as in `make_rows`.
        """
        if not prompts:
            return []
        size = self.learning.micro_batch_size
        capacity = self.learning.pack_tokens and packed_length(self.learning.pack_tokens)
        if capacity:
            layout = pack(prompts, responses, capacity, share=self.share_prompts)
            # Of the fullest row of all calls, so that these have one shape.
            width = max(sum(len(responses[i]) for i in row) for row in layout)
        else:
            lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
            layout, width = [[i] for i in sorted(range(len(prompts)), key=lambda i: (lengths[i], i))], 0
        scores: list[np.ndarray] = [np.empty(0, np.float32)] * len(prompts)
        for start in range(0, len(layout), size):
            few = layout[start : start + size]
            options: dict[str, Any] = dict(longest=longest)
            if capacity:
                options = dict(packed=capacity, share=self.share_prompts, width=width)
            rows = make_rows(prompts, responses, layout=few, rows=size, **options)
            lp = to_host(self.score(params, rows, base))
            for r, row in enumerate(few):
                ends = np.cumsum([len(responses[i]) for i in row])
                for i, part in zip(row, np.split(lp[r], ends), strict=False):
                    scores[i] = part
        return scores

    def update(
        self, state: TrainState, batch: TreeBatch, base: nnx.State | None = None
    ) -> tuple[TrainState, Metrics, TreeAdvantages]:
        """Makes one update. The arrays of `state` are donated and must not be used again; those of `base` are not.

        Returns:
          The new state; metrics, float32 scalars; and [trees, nodes] arrays of the rewards and advantages used.

        Metrics over the sampled tokens: `kl` (the configured estimate; 0 without a reference), `entropy`,
        `clip_fraction`, `ratio`, `rollout_weight`, `logprob_gap` (mean |lp_old - lp_roll|). Over the nodes:
        `reward_mean` (raw), `advantage_mean`, `advantage_std`, `nodes`, `tokens`. Over the trees:
        `zero_advantage_trees`, the share of them that teaches nothing. `loss`, and `grad_norm` before clipping;
        `skipped`, 1 where that is not finite, and nothing was changed (see `descend`).
        """
        return self.program(state)(state, batch, base)

    def program(self, state: TrainState) -> Any:
        """The compiled update, (state, batch, base) -> what `update` returns. See `step_program`."""
        return step_program(_update, self, state, results=2)


@functools.partial(jax.jit, static_argnums=0)
def _score(learner: Learner, params: nnx.State, rows: Rows, base: nnx.State | None) -> Float[Array, "rows response"]:
    lp, _ = response_logprobs(
        learner.decoder(params, base),
        rows,
        temperature=learner.temperature,
        scan_unroll=learner.learning.scan_unroll,
    )
    return jnp.where(rows.mask, lp, 0.0)


def _loss(
    learner: Learner,
    params: nnx.State,
    samples: SampleRows,
    advantage: Float[Array, "rows samples"],
    base: nnx.State | None,
) -> tuple[Float[Array, ""], PolicyTerms]:
    """The loss terms of one micro-batch (`samples` without the micro axis), numerator first for differentiation."""
    lp, entropy = response_logprobs(
        learner.decoder(params, base),
        samples.rows,
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
        member=_member(samples.rows, advantage.shape[1]),
        config=learner.learning,
        budget=learner.budget,
    )
    return terms.numerator, terms


def _member(rows: Rows, samples: int) -> Member:
    """Which response tokens are of which sample of their row."""
    if rows.segment is None:
        return rows.mask[:, None]
    segment = jnp.take_along_axis(rows.segment, rows.index, axis=1)
    return rows.mask[:, None] & (segment[:, None] == 1 + jnp.arange(samples)[:, None])


def step_program(step: Callable[..., Any], learner: Learner, state: TrainState, results: int) -> Any:
    """The compiled (state, batch, base) -> (new state, ...) of a step of some learning, for states that lie where this
    one does, which it donates.

    The new state lies where the old one did: left to the compiler, a weight could come back in another place, and the
    next call would compile again.

    Args:
      step: (learner, state, batch, base) -> (new state, ...), a function of a module: programs are kept by it.
      learner: what it is given first.
      state: may be abstract; `.lower(state, batch, base)` of the result then compiles ahead of time.
      results: how many `step` returns beside the state.
    """
    leaves, structure = jax.tree.flatten(state)
    return _step_program(step, learner, structure, tuple(x.sharding for x in leaves), results)


@functools.cache
def _step_program(
    step: Callable[..., Any], learner: Learner, structure: Any, shardings: tuple[Sharding, ...], results: int
) -> Any:
    placement = jax.tree.unflatten(structure, shardings)
    return jax.jit(
        functools.partial(step, learner),
        donate_argnums=0,
        in_shardings=(placement, None, None),
        out_shardings=(placement, *(None,) * results),
    )


def descend(
    optimizer: FrozenConfigDict,
    gradient: nnx.State,
    norm: Float[Array, ""],
    params: nnx.State,
    opt_state: optax.OptState,
) -> tuple[nnx.State, optax.OptState, Float[Array, ""]]:
    """A step of the optimizer; of a gradient that is not finite, none.

    One such gradient would leave no number in the weights, nor in any checkpoint from then on.

    Args:
      optimizer: the agent's section of the config.
      gradient: as computed, before clipping.
      norm: its global norm.
      params: what is learned.
      opt_state: the optimizer's state.

    Returns:
      The new weights and the new state, or the old ones; 1 where it is these, else 0.
    """
    finite = jnp.isfinite(norm)

    def step(params: nnx.State, opt_state: optax.OptState) -> tuple[nnx.State, optax.OptState]:
        changes, opt_state = make_optimizer(optimizer).update(gradient, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    # A branch, not a choice between two results: that would keep both in memory.
    params, opt_state = jax.lax.cond(finite, step, lambda *same: same, params, opt_state)
    return params, opt_state, 1 - finite.astype(jnp.float32)


def _update(
    learner: Learner, state: TrainState, batch: TreeBatch, base: nnx.State | None
) -> tuple[TrainState, Metrics, TreeAdvantages]:
    config, samples = learner.learning, batch.samples
    trees = response_advantages(
        batch.reward,
        batch.parent,
        batch.agent,
        batch.graded,
        batch.length,
        config,
        budget=learner.budget,
        problem=batch.problem,
        kl=batch.kl,
    )
    advantage = trees.advantage[samples.tree, samples.slot]

    params = state.params
    if learner.optimizer.offload == "all":
        params = jax.device_put(params, jax.memory.Space.Device)

    # Σ gradients, in float32 as the weights are, divided once by Σ denominators.
    loss = lambda params, samples, advantage: _loss(learner, params, samples, advantage, base)
    gradient, terms = sum_gradients(loss, params, (samples, advantage), batch.filled)
    terms = jax.tree.map(lambda x: x.sum(0), terms)
    gradient = jax.tree.map(lambda g: g / terms.denominator, gradient)

    gradient_norm = optax.tree.norm(gradient)

    opt_state = state.opt_state
    if learner.optimizer.offload != "none":
        # Not before all of the gradient is there: activations have gone by then. The norm stands for it: a barrier
        # before the gradient itself would change what is fused with it, and so the last bits.
        opt_state, _ = jax.lax.optimization_barrier((opt_state, gradient_norm))
        opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
    params, opt_state, skipped = descend(learner.optimizer, gradient, gradient_norm, params, opt_state)
    new_state = TrainState(params, opt_state, state.step + 1)

    tokens = terms.sums["tokens"]
    nodes = samples.valid.sum()

    def node_mean(x: Float[Array, "micro rows samples"]) -> Float[Array, ""]:
        return jnp.where(samples.valid, x, 0.0).sum() / nodes

    mean = node_mean(advantage)
    alive = batch.graded.any(-1)
    metrics = {name: total / tokens for name, total in terms.sums.items() if name != "tokens"} | {
        "loss": terms.numerator / terms.denominator,
        "grad_norm": gradient_norm,
        "skipped": skipped,
        "reward_mean": node_mean(batch.reward[samples.tree, samples.slot]),
        "advantage_mean": mean,
        "advantage_std": jnp.sqrt(node_mean((advantage - mean) ** 2)),
        "zero_advantage_trees": (alive & (trees.advantage == 0).all(-1)).sum() / alive.sum(),
        "nodes": nodes.astype(jnp.float32),
        "tokens": tokens,
    }
    return new_state, metrics, trees
