"""The programs that a run would compile, on arguments that are shapes and places only.

They are the run's own functions, called as `training.agent`, `rollout.engine` and `learning.update` call them, at the
largest sizes that the config allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from mars2_jax.learning.batch import Sample, TreeArrays, TreeBatch, make_batch
from mars2_jax.learning.optimizer import HOST_MEMORY
from mars2_jax.learning.rows import make_rows, packed_length
from mars2_jax.learning.update import Learner
from mars2_jax.models import cache as kv
from mars2_jax.models.buckets import bucket
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.lora import Lora, learned
from mars2_jax.parallel.mesh import placed, replicated, row_shards, rows
from mars2_jax.rollout import programs
from mars2_jax.rollout.engine import SHORTEST, prefill_rows
from mars2_jax.roster import weight_owners
from mars2_jax.training.policy import abstract_policy, engine_layout, longest_sample, longest_sequence, make_handover

__all__ = ["Program", "Resident", "device_bytes", "host_bytes", "team_programs"]

_STOP_IDS = 2
"""End-of-turn tokens of a model. Their number is the tokenizer's, which is not read; it has no weight."""


@dataclasses.dataclass(frozen=True)
class Resident:
    """Arrays that stay on the devices between programs.

    Attributes:
      agent: whose they are; of what agents share, the first of them.
      what: what they are.
      bytes: on each device.
      host_bytes: in the memory of the host, for each device.
    """

    agent: str
    what: str
    bytes: int
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run.

    Attributes:
      kind: "prefill", "decode", "score" or "update".
      agents: those that have weights and run it.
      size: what one run of it works on, for people.
      tokens: those of one run, padding included.
      mesh: what it runs on, which is in context while it is lowered.
      lower: makes it ready to be compiled.
      resident: bytes of its arguments, on each device, that are there anyway (weights, caches).
    """

    kind: str
    agents: tuple[str, ...]
    size: str
    tokens: int
    mesh: Mesh
    lower: Callable[[], jax.stages.Lowered]
    resident: int


def device_bytes(tree: Any) -> int:
    """Bytes, on the device that has most of them, of arrays or their shapes, without padding. What lies in host memory
    is on no device."""
    return sum(_part(x) for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST_MEMORY)


def host_bytes(tree: Any) -> int:
    """Bytes in host memory, for the device that has most of them."""
    return sum(_part(x) for x in jax.tree.leaves(tree) if x.sharding.memory_kind == HOST_MEMORY)


def _part(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def team_programs(
    run: FrozenConfigDict, models: Mapping[str, ModelConfig], mesh: Mesh
) -> tuple[list[Program], list[Resident]]:
    """The programs of a team, each once however many agents run it, and what the team keeps on the devices.

    Args:
      run: the config.
      models: the shape of the model of each agent that has weights.
      mesh: the devices, which need not be there.
    """
    found: dict[Hashable, Program] = {}
    residents: list[Resident] = []
    held: set[tuple[str, str]] = set()
    for name, agent in weight_owners(run.agents).items():
        plan = _AgentPlan(name, run, agent, models[name], mesh)
        for what, tree in plan.shared().items():
            if (agent.model.path, what) not in held:
                held.add((agent.model.path, what))
                residents.append(Resident(name, what, device_bytes(tree)))
        residents += plan.residents()
        for key, program in plan.programs():
            if key in found:
                program = dataclasses.replace(found[key], agents=(*found[key].agents, name))
            found[key] = program
    return list(found.values()), residents


class _AgentPlan:
    """One agent, of shapes only."""

    def __init__(self, name: str, run: FrozenConfigDict, config: FrozenConfigDict, model: ModelConfig, mesh: Mesh):
        self.name, self.run, self.config, self.model, self.mesh = name, run, config, model, mesh
        decoder = abstract_policy(config.model, model, mesh, key=f"agents.{name}.model")
        everything = nnx.state(decoder)
        weights = jax.tree.map(lambda x: _shape(x, decoder.dtype, x.sharding), everything)
        # What it learns, and what lies under its adapters.
        self.lora = Lora.from_config(config.model.lora)
        self.params = nnx.filter_state(everything, learned(self.lora))
        self.checkpoint = nnx.filter_state(weights, nnx.Not(nnx.LoRAParam))
        self.base = self.checkpoint if self.lora else None
        # What it decodes with.
        self.handover = make_handover(decoder, run, mesh)
        self.graphdef = nnx.graphdef(self.handover.decoder)
        place = lambda x, sharding: _shape(x, x.dtype, sharding)
        converted = jax.eval_shape(self.handover.convert, weights)
        self.engine = jax.tree.map(place, converted, self.handover.shardings(weights))
        self.dtype, self.layout = decoder.dtype, engine_layout(decoder, run, mesh)
        rollout = run.rollout
        self.capacity = longest_sequence(run)
        self.length = bucket(self.capacity, SHORTEST, self.capacity)
        self.cache = self._entries(rollout.slots, self.length)
        self.learner = Learner.create(
            decoder,
            run.learning,
            config.optimizer,
            temperature=rollout.temperature,
            budget=rollout.max_new_tokens,
        )

    def _entries(self, rows: int, length: int) -> Any:
        """Keys and values where the engine has them."""
        entries = jax.eval_shape(lambda: kv.empty(self.model, rows, length, self.dtype, self.layout))
        mesh = self.handover.mesh
        return jax.tree.map(lambda x: _shape(x, x.dtype, placed(mesh, kv.AXES, x.shape)), entries)

    def shared(self) -> dict[str, Any]:
        """The checkpoint's weights that stay, shared by all agents that name it, see `training.policy.Weights`: under
        its adapters and as the reference of the KL term; for an engine that has nothing else, and under its adapters
        there. They are the same arrays if the engine's are not others."""
        learning = self.run.learning
        reference = learning.kl_coef > 0 and not learning.reference_every
        trains = self.config.trainable and (self.lora is not None or reference)
        decodes = not self.config.trainable or self.lora is not None
        plain, moved = "checkpoint's weights", "checkpoint's weights for engines"
        kept: dict[str, Any] = {}
        if trains or (decodes and not self.handover.copies):
            kept[plain] = self.checkpoint
        if decodes and self.handover.copies:
            kept[moved] = nnx.filter_state(self.engine, nnx.Not(nnx.LoRAParam))
        return kept

    def residents(self) -> list[Resident]:
        """What the agent keeps for itself, as `training.agent.Agent` does."""
        kept: dict[str, Any] = {}
        if self.config.trainable:
            state = self.learner.abstract(self.params)
            kept["master weights"] = state.params
            kept["optimizer state"] = state.opt_state
            if self.run.learning.reference_every:
                kept["reference"] = jax.tree.map(lambda x: _shape(x, self.dtype, x.sharding), self.params)
            kept["engine weights"] = nnx.filter_state(self.engine, learned(self.lora))
        kept["key-value cache"] = self.cache
        kept["prefilled prompts"] = self._prompt_memory()
        return [Resident(self.name, what, device_bytes(tree), host_bytes(tree)) for what, tree in kept.items()]

    def _prompt_memory(self) -> Any:
        """The prompts that the engine keeps prefilled, one row each, when their room is full."""
        tokens = self.run.rollout.prompt_memory or self.run.rollout.slots * self.capacity
        return self._entries(1, tokens)

    def programs(self) -> list[tuple[Hashable, Program]]:
        """The agent's programs, with a key that is equal where the compiled program is."""
        listed = [self._prefill(), self._decode()]
        if self.config.trainable:
            listed += [self._score(), self._update()]
        return listed

    def _prefill(self) -> tuple[Hashable, Program]:
        longest = max(self.run.rollout.max_prompt_tokens, self.run.eval.max_prompt_tokens)
        count = prefill_rows(row_shards(self.handover.mesh))
        length = bucket(max(longest - 1, 1), SHORTEST, self.capacity)
        tokens = self._by_rows(jax.ShapeDtypeStruct((count, length), jnp.int32))
        arguments = (self.graphdef, self.engine, tokens, self.layout)
        size = f"{count} prompts x {length:,} tokens"
        return self._program("prefill", size, count * length, programs.prefill, arguments, self.engine)

    def _decode(self) -> tuple[Hashable, Program]:
        count = self.run.rollout.slots
        slots = self._by_rows(jax.eval_shape(lambda: programs.empty_slots(count)))
        stops = jax.ShapeDtypeStruct((_STOP_IDS,), jnp.int32, sharding=replicated(self.handover.mesh))
        arguments = (self.graphdef, self.engine, self.cache, slots, stops, self.run.rollout.chunk)
        size = f"{count} slots x {self.length:,} tokens, a token each"
        return self._program("decode", size, count, programs.decode, arguments, (self.engine, self.cache))

    def _score(self) -> tuple[Hashable, Program]:
        count = self.run.learning.micro_batch_size
        prompt, response = self._longest_row()
        packed = self.run.learning.pack_tokens and packed_length(self.run.learning.pack_tokens)
        shape = dict(rows=count, longest=longest_sample(self.run), packed=packed, share=self.learner.share_prompts)
        batch = make_rows([prompt], [response], **shape)
        size = f"{count} rows x {batch.tokens.shape[1]:,} tokens"
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        # Master weights that lie in host memory are brought for it.
        resident = (self.learner.abstract(self.params).params, self.base)
        arguments = (self.params, shapes, self.base)
        return self._program(
            "score", size, batch.tokens.size, jax.jit(self.learner.score), arguments, resident, self.learner
        )

    def _update(self) -> tuple[Hashable, Program]:
        learning = self.run.learning
        batch = self._batch()
        state = self.learner.abstract(self.params)
        length = batch.samples.rows.tokens.shape[-1]
        count = batch.samples.rows.tokens.shape[0] * learning.micro_batch_size
        size = f"{count} rows x {length:,} tokens, {learning.micro_batch_size} at a time"
        program = self.learner.program(state)
        arguments, resident = (state, batch, self.base), (state, self.base)
        return self._program("update", size, batch.samples.rows.tokens.size, program, arguments, resident, self.learner)

    def _batch(self) -> TreeBatch:
        """The largest batch of an update: every sample the longest there may be, no two of one tree or one prompt."""
        count, nodes = self.run.learning.train_batch_size, self.run.search.nodes + 1
        prompt, response = self._longest_row()
        scores = np.zeros(len(response), np.float32)
        reference = scores if self.run.learning.kl_coef > 0 else None
        ones = np.ones(nodes, np.int32)
        in_reward = reference is not None and self.run.learning.kl_in == "reward"
        kl = ones.astype(np.float32) if in_reward else None
        tree = TreeArrays(ones.astype(np.float32), ones, ones, ones.astype(bool), ones, kl=kl)
        samples = [Sample(i, 1, prompt + i, response, scores, scores, reference) for i in range(count)]
        batch, _ = make_batch(
            samples[: count // self.run.learning.minibatches],
            dict.fromkeys(range(count), tree),
            micro_batch_size=self.run.learning.micro_batch_size,
            longest=longest_sample(self.run),
            pack_tokens=self.run.learning.pack_tokens,
            share_prompts=self.learner.share_prompts,
            among=samples,
        )
        shapes = jax.tree.map(lambda x: _shape(x, x.dtype, replicated(self.mesh)), batch)
        split = jax.tree.map(lambda x: _shape(x, x.dtype, rows(self.mesh, leading=1)), batch.samples)
        return dataclasses.replace(shapes, samples=split)

    def _by_rows(self, tree: Any) -> Any:
        axes = lambda x: ("rows", *(None,) * (len(x.shape) - 1))
        return jax.tree.map(lambda x: _shape(x, x.dtype, placed(self.handover.mesh, axes(x), x.shape)), tree)

    def _longest_row(self) -> tuple[np.ndarray, np.ndarray]:
        rollout = self.run.rollout
        return np.zeros(rollout.max_prompt_tokens, np.int32), np.zeros(rollout.max_new_tokens, np.int32)

    def _program(
        self, kind: str, size: str, tokens: int, jitted: Any, arguments: tuple, resident: Any, *key: Hashable
    ) -> tuple[Hashable, Program]:
        mesh = self.handover.mesh if kind in ("prefill", "decode") else self.mesh
        lower = lambda: jitted.lower(*arguments)
        program = Program(kind, (self.name,), size, tokens, mesh, lower, device_bytes(resident))
        return (kind, *key, jax.tree.structure(arguments), *jax.tree.leaves(arguments)), program


def _shape(x: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
