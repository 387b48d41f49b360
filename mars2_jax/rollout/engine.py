"""An engine: a fixed number of slots that decode together, each at its own place in its own request."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from mars2_jax.errors import PromptTooLong
from mars2_jax.models import cache as kv
from mars2_jax.models.buckets import bucket
from mars2_jax.models.decode_attention import layout_for
from mars2_jax.models.decoder import Decoder
from mars2_jax.parallel.mesh import placed, row_shards
from mars2_jax.rollout import programs
from mars2_jax.rollout.running import Running
from mars2_jax.rollout.types import Completion, Finish, Request

__all__ = ["SHORTEST", "Engine", "prefill_rows"]


SHORTEST = 64
"""Least length that a cache or a prefill is padded to, in tokens."""


def _on_own_mesh(method: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
    """The method of an engine, run with the mesh of its parameters in context, which may be another than a training's.
    It is entered for every call: a context belongs to a thread."""

    @functools.wraps(method)
    def run(self: Engine) -> Any:
        mesh = self._beside.mesh if isinstance(self._beside, NamedSharding) else None
        with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext():
            return method(self)

    return run


def prefill_rows(shards: int) -> int:
    """Prompts in one prefill call where the rows of a batch are split into `shards` parts: four, rounded up to a
    multiple of that. With fewer in the queue it is one a part; rows that stay without a prompt are computed by devices
    that would have nothing else to do."""
    return shards * -(-4 // shards)


class Engine:
    """Continuous batching over slots with a static key-value cache.

    A request waits until a slot is free, its prompt is prefilled (or copied, if the engine has just seen it), and it
    decodes with whatever else is in the engine, `chunk` tokens a call. Its tokens are drawn with its own key, whatever
    its slot and its neighbours are. Log-probabilities may differ in the last bits with the sizes that things are padded
    to; `reset` makes those a function of the requests that follow.

    The cache is as long as what is in it needs, in buckets (`models.buckets`), up to the capacity: with the XLA
    attention every slot pays for the longest. A request is only taken whose prompt and budget fit the capacity, so
    that no sequence ever outgrows it.

    Args:
      decoder: the model; its parameters may be sharded.
      slots: sequences that decode together.
      chunk: tokens a slot decodes in one call.
      capacity: longest sequence (prompt and response) in tokens.
      stop_ids: tokens that end a response.
      detokenize: token ids to text, for requests with stop strings.
      prompt_memory: tokens of prefilled prompts kept for reuse, padding included; None keeps as many as the cache
        holds.
      layout: how the cache lies and what reads it, see `models.decode_attention.layout_for`; None is the fastest
        where the parameters lie.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        chunk: int,
        capacity: int,
        stop_ids: Sequence[int],
        detokenize: Callable[[np.ndarray], str] | None = None,
        prompt_memory: int | None = None,
        layout: kv.Layout | None = None,
    ):
        self._graphdef, self._params = nnx.split(decoder)
        self._config, self._dtype = decoder.config, decoder.dtype
        self._chunk, self.capacity = chunk, capacity
        self._beside = jax.tree.leaves(self._params)[0].sharding
        self._layout = layout or layout_for("auto", self._config, self._dtype, self._beside)
        stops = np.asarray([*stop_ids] or [-1], np.int32)
        self._stop_ids = jax.device_put(stops, self._placement((None,), stops.shape))
        self._detokenize = detokenize
        self._memory_tokens = slots * capacity if prompt_memory is None else prompt_memory
        self._memory: collections.OrderedDict[bytes, kv.KeyValues] = collections.OrderedDict()
        self._queue: collections.deque[tuple[int, Request]] = collections.deque()
        self._running: list[Running | None] = [None] * slots
        self._flight: programs.Emitted | None = None  # of a chunk that was started and not collected
        self._done: list[tuple[int, Completion]] = []  # collected and not returned
        self._open: set[int] = set()  # ids of the requests that were not returned
        self._submitted = 0
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        self._cache_length = 0
        self._cache: Any = None
        self._slots = self._put_rows(programs.empty_slots(slots))

    def _placement(self, axes: Sequence[str | None], shape: Sequence[int]) -> Sharding:
        """Where an array with these logical axes lies: beside the weights. Everything does, from the start: a program
        is compiled anew for arguments that are not placed yet."""
        one = self._beside
        return placed(one.mesh, axes, shape) if isinstance(one, NamedSharding) else one

    def _put_rows(self, tree: Any) -> Any:
        """Arrays with an entry a slot (or a prompt) along their first axis."""
        rows = lambda x: self._placement(("rows", *(None,) * (np.ndim(x) - 1)), np.shape(x))
        return jax.device_put(tree, jax.tree.map(rows, tree))

    def set_params(self, params: nnx.State) -> None:
        """Decodes with other weights of the same model from now on.

        Raises:
          RuntimeError: requests are open; their tokens would come from two models.
        """
        if self.pending:
            raise RuntimeError(f"cannot change the weights while {self.pending} requests are open")
        self._params = params
        self._memory.clear()

    def reset(self) -> None:
        """Forgets what was decoded before, so that results depend, to the bit, only on the requests from here on.

        Raises:
          RuntimeError: requests are open.
        """
        if self.pending:
            raise RuntimeError(f"cannot reset the engine while {self.pending} requests are open")
        self._memory.clear()
        self._cache, self._cache_length = None, 0
        self._slots = self._put_rows(programs.empty_slots(len(self._running)))

    @property
    def dtype(self) -> Any:
        """The type that it computes in."""
        return self._dtype

    @property
    def params(self) -> nnx.State:
        """The weights that it decodes with."""
        return self._params

    @property
    def cache_length(self) -> int:
        """Entries that the cache has room for in each slot."""
        return self._cache_length

    @property
    def pending(self) -> int:
        """Requests submitted and not returned."""
        return len(self._open)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          PromptTooLong: the prompt and the budget together pass the engine's capacity.
          ValueError: an id that is open, an empty prompt, a token that the vocabulary does not have, a response that
            is whole or has used its budget up, a key that is none, or stop strings for an engine that cannot read text.
        """
        length, budget = len(request.prompt), request.sampling.max_new_tokens
        if request.id in self._open:
            raise ValueError(f"request {request.id} is open already")
        if length == 0:
            raise ValueError(f"request {request.id}: the prompt is empty")
        if length + budget > self.capacity:
            raise PromptTooLong(
                f"a prompt of {length} tokens with a budget of {budget} passes the cache of {self.capacity} tokens: "
                "raise config.rollout.max_prompt_tokens or shorten the prompt"
            )
        if request.so_far is not None and len(request.so_far.tokens) >= budget:
            raise ValueError(
                f"request {request.id}: {budget} tokens of the response exist already: nothing is left to do"
            )
        if request.so_far is not None and request.so_far.finish != "abort":
            raise ValueError(f"request {request.id}: its response is whole already ({request.so_far.finish})")
        context = request.context
        if context.min() < 0 or context.max() >= self._config.vocab_size:
            raise ValueError(f"request {request.id}: token ids must lie in [0, {self._config.vocab_size})")
        if np.shape(request.key) != (2,) or np.asarray(request.key).dtype != np.uint32:
            raise ValueError(f"request {request.id}: its key must be uint32[2], the data of a threefry key")
        if request.sampling.stop and self._detokenize is None:
            raise ValueError(f"request {request.id} has stop strings: give the engine a detokenize function")
        self._queue.append((self._submitted, request))
        self._open.add(request.id)
        self._submitted += 1

    @_on_own_mesh
    def dispatch(self) -> None:
        """Fills free slots from the queue and starts decoding a chunk, without waiting for it; `step` collects it.

        Does nothing where a chunk is under way or no request is open.
        """
        if self._flight is not None:
            return
        self._admit()
        needs = [r.length + min(self._chunk, r.left) for r in self._running if r is not None]
        if not needs:
            return
        self._reserve(max(needs))
        self._cache, self._slots, self._flight = programs.decode(
            self._graphdef, self._params, self._cache, self._slots, self._stop_ids, self._chunk
        )

    def step(self) -> list[Completion]:
        """Collects the chunk that `dispatch` started, or decodes one, and returns what finished, in order of
        submission."""
        self.dispatch()
        self._collect()
        done, self._done = sorted(self._done, key=lambda d: d[0]), []
        self._open.difference_update(completion.id for _, completion in done)
        return [completion for _, completion in done]

    def abort(self, id: int) -> Completion | None:
        """Takes a request out and frees its slot.

        Returns:
          What it has so far, with finish "abort", from which `Request.so_far` can go on (a request that finished in a
          chunk that was under way comes back whole); None where no request with this id is open.
        """
        if id not in self._open:
            return None
        self._collect()
        self._open.discard(id)
        for index, (_, completion) in enumerate(self._done):
            if completion.id == id:
                del self._done[index]
                return completion
        for index, (_, request) in enumerate(self._queue):
            if request.id == id:
                del self._queue[index]
                return Running(request, 0).completion("abort")
        slot, running = next((s, r) for s, r in enumerate(self._running) if r is not None and r.request.id == id)
        self._free([slot])
        return running.completion("abort")

    def _collect(self) -> None:
        """Waits for the chunk that is under way, if any, and takes what came out."""
        if self._flight is None:
            return
        out, active = jax.device_get((self._flight, self._slots.active))
        self._flight = None
        finished: list[int] = []
        cut: list[int] = []  # of these, those that the program still decodes
        for slot, running in enumerate(self._running):
            if running is None:
                continue
            new = int(out.emitted[slot])
            running.extend(out.token[slot, :new], out.logprob[slot, :new], out.score[slot, :new])
            finish: Finish | None = None if active[slot] else "stop" if out.stopped[slot] else "length"
            if self._detokenize is not None and running.cut(self._detokenize, new):
                finish = "stop"
            self.decoded_tokens += new
            if finish is not None:
                self._done.append((running.order, running.completion(finish)))
                (cut if active[slot] else finished).append(slot)
        for slot in finished:
            self._running[slot] = None
        self._free(cut)

    def _free(self, slots: Sequence[int]) -> None:
        """Empties slots that still decode."""
        if not slots:
            return
        active = np.array(self._slots.active)
        for slot in slots:
            self._running[slot], active[slot] = None, False
        self._slots = self._slots._replace(active=self._put_rows(active))

    def _admit(self) -> None:
        admitted: list[tuple[int, Request]] = []
        for slot, running in enumerate(self._running):
            if running is None and self._queue:
                order, request = self._queue.popleft()
                self._running[slot] = Running(request, order)
                admitted.append((slot, request))
        if admitted:
            self._prefill([r for _, r in admitted])
            self._place(admitted)

    def _reserve(self, length: int) -> None:
        """Makes the cache long enough. It never shrinks while in use: a shorter one would be one more program."""
        length = self._padded(length)
        if self._cache is None:
            self._cache = self._empty_cache(length)
        elif length > self._cache_length:
            layers, self._cache = list(self._cache), None
            for index in range(len(layers)):
                layers[index] = programs.grow(layers[index], length)
            self._cache = tuple(layers)
        else:
            return
        self._cache_length = length

    def _padded(self, length: int) -> int:
        """What a cache or a prefill of `length` tokens is padded to."""
        # What was padded before may lie beyond the capacity itself.
        return bucket(min(length, self.capacity), SHORTEST, self.capacity)

    def _empty_cache(self, length: int) -> kv.KeyValues:
        """A cache of zeros, each device's part made on the device."""
        size = (len(self._running), length, self._dtype, self._layout)
        shapes = jax.eval_shape(functools.partial(kv.empty, self._config, *size))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._placement(kv.AXES, x.shape)), shapes)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Computes keys and values of the prompts that are not in memory, shortest first, each distinct one once."""
        todo: dict[bytes, np.ndarray] = {}
        for request in requests:
            context = request.context
            if (key := context.tobytes()) in self._memory:
                self._memory.move_to_end(key)
            elif len(context) > 1:
                todo[key] = context
        ordered = sorted(todo.items(), key=lambda kp: len(kp[1]))
        shards = row_shards(self._beside.mesh) if isinstance(self._beside, NamedSharding) else 1
        while ordered:
            rows = prefill_rows(shards) if len(ordered) >= prefill_rows(shards) else shards
            batch, ordered = ordered[:rows], ordered[rows:]
            tokens = np.zeros((rows, self._padded(max(len(p) - 1 for _, p in batch))), np.int32)
            for row, (_, prompt) in enumerate(batch):
                tokens[row, : len(prompt) - 1] = prompt[:-1]
                self.prefilled_tokens += len(prompt) - 1
            entries = programs.prefill(self._graphdef, self._params, self._put_rows(tokens), self._layout)
            for row, (key, _) in enumerate(batch):
                self._memory[key] = programs.take_row(entries, np.int32(row)) if rows > 1 else entries

    def _place(self, admitted: Sequence[tuple[int, Request]]) -> None:
        """Copies each prompt's entries into its slot and sets the slot's state."""
        slots = jax.tree.map(np.array, jax.device_get(self._slots))
        for slot, request in admitted:
            context = request.context
            if len(context) > 1:
                entries = self._memory[context.tobytes()]
                self._reserve(kv.cache_length(entries))
                self._cache = programs.insert(self._cache, entries, np.int32(slot))
            sampling = request.sampling
            slots.token[slot] = context[-1]
            slots.length[slot] = len(context) - 1
            slots.made[slot] = len(context) - len(request.prompt)
            slots.budget[slot] = sampling.max_new_tokens
            slots.active[slot] = True
            slots.key[slot] = request.key
            slots.sampler.temperature[slot] = sampling.temperature
            slots.sampler.top_k[slot] = sampling.top_k
            slots.sampler.top_p[slot] = sampling.top_p
            slots.sampler.min_p[slot] = sampling.min_p
        self._slots = self._put_rows(slots)
        room = self._memory_tokens
        for key, entries in reversed(list(self._memory.items())):
            room -= kv.cache_length(entries)
            if room < 0:
                del self._memory[key]
