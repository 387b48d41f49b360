"""An agent: one language model with its own weights, optimizer, reference, engine and buffer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from mars2_jax.learning.advantage import TreeAdvantages
from mars2_jax.learning.batch import Sample, TreeArrays, make_batch
from mars2_jax.learning.loss import response_kl
from mars2_jax.learning.update import Learner, TrainState
from mars2_jax.models.lora import Lora, fresh_adapters, learned
from mars2_jax.models.tokenizer import ChatTokenizer
from mars2_jax.parallel.exchange import put, to_host
from mars2_jax.parallel.mesh import param_shardings, rows
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.ports import SharedEngine
from mars2_jax.rollout.types import Completion, SamplingParams
from mars2_jax.roster import is_served, weight_owner, weight_owners
from mars2_jax.training.buffer import Buffer, TreeKey
from mars2_jax.training.endpoint import EndpointAgent
from mars2_jax.training.keys import adapter_key
from mars2_jax.training.minibatches import minibatches
from mars2_jax.training.policy import (
    ModelFile,
    Weights,
    engine_layout,
    longest_sample,
    longest_sequence,
    make_handover,
)
from mars2_jax.training.reference import Reference
from mars2_jax.training.writer import EngineWriter, Prompter

__all__ = ["Agent", "Member", "Role", "build_team", "make_prompter", "reset_engines"]


class Agent:
    """A member of the team with weights of its own. See `build_team`.

    What it learns is `state.params`: all weights, or adapters (`config.model.lora`) over those of the checkpoint, which
    stay as they are.

    Attributes:
      name: its name in the config.
      config: its section of the config.
      engine: decodes with its current weights, for all that play with them.
      buffer: its finished nodes that no update has used yet.
      state: weights, optimizer state and number of updates; None where it does not learn.
      lora: which adapters it learns; None where it learns all weights or nothing.
      base: the frozen weights under its adapters; None where it has none.
    """

    def __init__(
        self,
        name: str,
        config: FrozenConfigDict,
        run: FrozenConfigDict,
        model: ModelFile,
        weights: Weights,
        *,
        learn: bool,
    ):
        self.name, self.config, self._run = name, config, run
        self.tokenizer = model.tokenizer
        self.buffer = Buffer()
        self.state: TrainState | None = None
        self.lora = lora = Lora.from_config(config.model.lora)
        self.base = weights.base if lora else None
        decoder = model.abstract(lora)
        self._handover = make_handover(decoder, run, model.mesh)
        # What lies under its adapters in the engine.
        self._engine_base = weights.rollout if lora else None
        # None without a KL term.
        self._reference: Reference | None = None
        start = weights.master
        if lora:
            adapters = nnx.state(decoder, nnx.LoRAParam)
            start = fresh_adapters(adapters, adapter_key(run.seed, name), param_shardings(model.mesh, adapters))
        rollout = run.rollout
        self.engine = Engine(
            nnx.merge(nnx.graphdef(self._handover.decoder), self._complete(start) if lora else weights.rollout),
            slots=rollout.slots,
            chunk=rollout.chunk,
            capacity=longest_sequence(run),
            stop_ids=model.tokenizer.stop_ids,
            detokenize=model.tokenizer.decode,
            prompt_memory=rollout.prompt_memory or None,
            layout=engine_layout(decoder, run, model.mesh),
        )
        self._shared_engine = SharedEngine(self.engine)
        if not config.trainable:
            return
        learner = functools.partial(
            Learner.create,
            learning=run.learning,
            optimizer=config.optimizer,
            # An evaluation may search with greedy text: then nothing is scored.
            temperature=rollout.temperature if learn else 1.0,
            budget=rollout.max_new_tokens,
        )
        self.learner = learner(decoder)
        self._params_shape = _shapes(nnx.state(decoder, learned(lora)), model.mesh)
        if learn:
            assert start is not None
            if every := run.learning.reference_every:
                self._reference = Reference(self.learner, start, self.base, every=every, dtype=decoder.dtype)
            elif run.learning.kl_coef > 0:
                assert weights.base is not None
                self._reference = Reference(learner(model.abstract()), weights.base)
            self.set_state(self.learner.init(start))

    def checkpoint(self) -> dict[str, Any]:
        """The arrays on the devices that its learning goes on from, by names that are the agent's own."""
        saved: dict[str, Any] = {self.name: self.state}
        if self._reference is not None and self._reference.every:
            # No agent has a hyphen in its name.
            saved[f"{self.name}-reference"] = self._reference.params
        return saved

    def abstract_checkpoint(self) -> dict[str, Any]:
        """Shapes, types and shardings of what `checkpoint` returns."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return jax.tree.map(shape, self.checkpoint())

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `checkpoint` returned, among that of others."""
        if self._reference is not None and self._reference.every:
            self._reference.params = saved[f"{self.name}-reference"]
        self.set_state(saved[self.name])

    def set_state(self, state: TrainState) -> None:
        """Learns and decodes from this state on."""
        self.state = state
        self.hand_over()

    def take_up(self, buffer: Buffer) -> int:
        """Goes on with the nodes of a checkpoint. Tells how many it cannot learn from under the config of this run, and
        left out: they are too long, or were not scored as it asks for."""
        learning = self._run.learning
        self.buffer = buffer
        return buffer.adapt(
            longest=longest_sample(self._run),
            reference=learning.kl_coef > 0,
            kl=learning.kl_coef > 0 and learning.kl_in == "reward",
        )

    def hand_over(self) -> None:
        """Decodes with what it has learned from now on. Weights are cast and moved for it: once after all updates of a
        step, not after each."""
        assert self.state is not None
        self.set_params(self.state.params)

    def set_params(self, params: nnx.State) -> None:
        """Decodes with these weights, or adapters, from now on; what it learns from stays."""
        self.engine.set_params(self._complete(self.learner.on_devices(params)))

    def _complete(self, params: nnx.State) -> nnx.State:
        """All that its engine needs, in the type that it computes in and where it decodes: cast and moved once, not in
        every step."""
        params = self._handover(params)
        return params if self._engine_base is None else nnx.merge_state(params, self._engine_base)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of its training state, which need not exist."""
        return self.learner.abstract(self._params_shape)

    def writer(self, sampling: SamplingParams, *, single: bool = False, role: str | None = None) -> EngineWriter:
        """Its voice in a search, or (`single`) for the single answers of an evaluation; or that of the agent `role`,
        which plays with its weights."""
        name = role or self.name
        prompter = make_prompter(name, self._run, self.tokenizer, single=single)
        return EngineWriter(name, self._shared_engine.port(), self.tokenizer, prompter, sampling)

    def remember(self, written: list[tuple[TreeKey, int, Completion]], trees: dict[TreeKey, TreeArrays]) -> int:
        """Puts graded nodes that its weights wrote into its buffer, scored under these and its reference weights.

        The current weights are those that wrote them: `lp_old` against the engine's own log-probabilities is the gap
        between trainer and sampler and nothing else. With `learning.overlong_mask`, nodes that the budget cut off are
        left out (overlong filtering of DAPO, arXiv 2503.14476, section 3.4): they stand in their trees as all others
        do, but neither in the loss nor in what it is divided by.

        Returns:
          How many were left out.
        """
        assert self.state is not None
        learning = self._run.learning
        kl_in_reward = bool(learning.kl_coef) and learning.kl_in == "reward"
        kept = [node for node in written if not (learning.overlong_mask and node[2].finish == "length")]
        masked = len(written) - len(kept)
        # The KL is in the reward of every node of a tree, learned from or not.
        written = written if kl_in_reward else kept
        if not written:
            return masked
        prompts = [c.prompt for _, _, c in written]
        responses = [c.tokens for _, _, c in written]
        longest = longest_sample(self._run)
        params = self.learner.on_devices(self.state.params)
        old = self.learner.score_responses(params, prompts, responses, self.base, longest=longest)
        reference: list[np.ndarray] | list[None] = [None] * len(written)
        updates = int(self.state.step)
        if self._reference is not None:
            same = self._reference.is_policy(updates)
            reference = old if same else self._reference.score(prompts, responses, longest=longest)
        samples = [
            Sample(tree, slot, c.prompt, c.tokens, c.logprobs, lp_old, lp_ref, updates)
            for (tree, slot, c), lp_old, lp_ref in zip(written, old, reference, strict=True)
        ]
        if kl_in_reward:
            trees = _with_kl(trees, samples, learning.kl)
            learned_from = {(tree, slot) for tree, slot, _ in kept}
            samples = [sample for sample in samples if (sample.tree, sample.slot) in learned_from]
        self.buffer.add(samples, trees)
        return masked

    def drop_stale(self) -> int:
        """Drops from the buffer what `learning.max_staleness` does not allow to learn from now; tells how many."""
        assert self.state is not None
        limit = self._run.learning.max_staleness
        return self.buffer.drop(written_before=int(self.state.step) - limit) if limit else 0

    def update(self, mesh: Mesh) -> tuple[dict[str, float], list[TreeKey], TreeAdvantages]:
        """The updates from the oldest `train_batch_size` samples of the buffer: `learning.epochs` passes over them, of
        `learning.minibatches` updates each.

        All of them have the same trees, whole, and so the same advantages. The engine has the new weights after
        `hand_over`; between the two it must not decode.

        Returns:
          Metrics, means over the updates; the trees of the batch; the shaped rewards and advantages that were used,
          [trees, nodes], in their order.
        """
        assert self.state is not None
        learning = self._run.learning
        samples, trees = self.buffer.take(learning.train_batch_size)
        updates = int(self.state.step)
        several = []
        for part in minibatches(
            len(samples),
            epochs=learning.epochs,
            parts=learning.minibatches,
            seed=self._run.seed,
            agent=self.name,
            updates=updates,
        ):
            batch, keys = make_batch(
                [samples[i] for i in part],
                trees,
                micro_batch_size=learning.micro_batch_size,
                longest=longest_sample(self._run),
                pack_tokens=learning.pack_tokens,
                share_prompts=self.learner.share_prompts,
                whole_problems=learning.estimator == "tree_grpo",
                among=samples,
            )
            if mesh.size > 1:
                batch = dataclasses.replace(batch, samples=put(batch.samples, rows(mesh, leading=1)))
            self.state, metrics, advantages = self.learner.update(self.state, batch, self.base)
            several.append(metrics)
            updates += 1
            if self._reference is not None and self._reference.due(updates):
                self._reference.take(self.learner.on_devices(self.state.params))
        several, advantages = to_host((several, advantages))
        means = {name: float(np.mean([metrics[name] for metrics in several])) for name in several[0]}
        return means, keys, advantages  # type: ignore[return-value]


class Role:
    """A member of the team that plays with the weights of another, under a prompt of its own.

    Attributes:
      name: its name in the config.
      owner: the agent whose weights, engine and buffer serve both.
    """

    def __init__(self, name: str, owner: Agent):
        self.name, self.owner = name, owner

    def writer(self, sampling: SamplingParams, *, single: bool = False) -> EngineWriter:
        """See `Agent.writer`."""
        return self.owner.writer(sampling, single=single, role=self.name)


Member = Agent | Role | EndpointAgent
"""Whatever may play in a team."""


def reset_engines(team: Sequence[Member]) -> None:
    """Resets every engine of the team, so that what follows hangs on nothing that was before."""
    for member in team:
        if isinstance(member, Agent):
            member.engine.reset()


def _with_kl(trees: dict[TreeKey, TreeArrays], samples: Sequence[Sample], kind: str) -> dict[TreeKey, TreeArrays]:
    """The trees with the KL of the samples' responses to the reference; other nodes have none that the agent knows."""
    kl = {key: np.zeros(len(tree.reward), np.float32) for key, tree in trees.items()}
    references = [s.lp_ref for s in samples if s.lp_ref is not None]
    for sample, value in zip(samples, response_kl([s.lp_old for s in samples], references, kind), strict=True):
        kl[sample.tree][sample.slot] = value  # type: ignore[index]
    return {key: dataclasses.replace(tree, kl=kl[key]) for key, tree in trees.items()}


def _shapes(abstract: nnx.State, mesh: Mesh) -> nnx.State:
    """Shapes and shardings of parameters in float32."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=sharding),
        abstract,
        param_shardings(mesh, abstract),
    )


def make_prompter(name: str, run: FrozenConfigDict, tokenizer: ChatTokenizer, *, single: bool = False) -> Prompter:
    """The prompter of the agent `name`, for searches or for the single answers of an evaluation."""
    longest = (single and run.eval.max_prompt_tokens) or run.rollout.max_prompt_tokens
    key = "eval.max_prompt_tokens" if single and run.eval.max_prompt_tokens else "rollout.max_prompt_tokens"
    tokenizer = tokenizer.with_thinking(run.agents[name].enable_thinking, f"agents.{name}.enable_thinking")
    return Prompter(
        name, tokenizer, role=run.agents[name].role, feedback=run.prompts.feedback, max_tokens=longest, key=key
    )


def build_team(run: FrozenConfigDict, files: dict[str, ModelFile], *, learn: bool = True) -> list[Member]:
    """Loads the models and makes the agents, in the order of their names in the config.

    Agents of one checkpoint start from equal weights, read once, and then go their own ways: those with adapters share
    these weights for good. `learn=False` makes no optimizer states and no references.
    """
    owners = weight_owners(run.agents)
    learners = [agent.model for agent in owners.values() if learn and agent.trainable]
    masters = {model.path for model in learners if not model.lora.rank}
    # Of a reference that is refreshed each agent has a copy of its own.
    shared_reference = run.learning.kl_coef > 0 and not run.learning.reference_every
    bases = {model.path for model in learners if model.lora.rank or shared_reference}
    weights = {}
    for path, file in files.items():
        handover = make_handover(file.abstract(), run, file.mesh)
        weights[path] = file.load(handover, base=path in bases, master=path in masters)
    agents = {
        name: Agent(name, config, run, files[config.model.path], weights[config.model.path], learn=learn)
        for name, config in owners.items()
    }

    def member(name: str) -> Member:
        if is_served(run.agents[name]):
            return EndpointAgent(name, run)
        return agents[name] if name in agents else Role(name, agents[weight_owner(run.agents, name)])

    return [member(name) for name in run.agents]
