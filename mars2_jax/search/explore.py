"""Tree-asynchronous expansion: many trees searched at once, none waiting for another.

Every tree is a chain: select, write, grade, select again. The trees of a batch run past each other, so that while one
waits for its verdict the engines decode for the rest. There is no barrier. (Where selection does not look at rewards,
strategies "grpo" and "flat_multi", nothing makes a chain of a tree: all its nodes are asked for at once. Otherwise
`in_tree_parallelism` allows several open nodes a tree; each is then chosen before the verdicts on the others are in,
which is another search than one at a time.)

Results do not depend on how fast anything is. The order in which requests enter the engines decides what shares a
batch, and through floating-point rounding what is sampled; so that order must not follow from the wall clock. Here time
is counted in ticks, one step of every writer each. A program that comes out of a writer goes to the grader at once, and
its verdict is used exactly `verdict_lag` ticks later: where the grader is slower the search waits for it, where it is
faster the verdict waits. Real time only changes how long that takes. When the writers have run dry there is nothing to
overlap with, and the oldest verdicts are used right away; that, too, follows from ticks alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32
from ml_collections import ConfigDict

from mars2_jax.grading.verdict import Grade
from mars2_jax.grading.verdict import reward as reward_of
from mars2_jax.search.forest import Expansion, Forest, empty, observe, reserve, void
from mars2_jax.search.saved import OpenNode, SavedSearch, UngradedNode
from mars2_jax.search.select import FLAT, Shape, select
from mars2_jax.search.writer import Attempt, Writer
from mars2_jax.tasks.problem import Problem

__all__ = ["Exploration", "Grader", "Seconds", "Suspended", "explore"]

# The two uses of a search's key. Selection and writing must not share random numbers.
_SELECT, _WRITE = 0, 1


class Suspended(Exception):
    """A search was stopped on request. `saved` is all that is needed to go on with it."""

    def __init__(self, saved: SavedSearch):
        super().__init__(f"suspended with {len(saved.open)} nodes being written")
        self.saved = saved


class Grader(Protocol):
    """What a search asks of a grader: a ticket now, a grade later. Grading goes on between the calls."""

    def submit(self, program: str, problem: Problem) -> int: ...

    def wait(self, ticket: int) -> Grade: ...


@dataclasses.dataclass
class Seconds:
    """Where the wall time of a search went, in seconds. The first three do not overlap.

    Attributes:
      decoding: inside the writers' `dispatch` and `step`.
      grading: waiting for a verdict that was due and not there: how long the writers waited for the grader.
      selecting: selection and backup, their dispatch and transfer included.
      grader_idle: of `decoding`, while no program was without a verdict: how long the grader, at the least, waited for
        the writers.
    """

    decoding: float = 0.0
    grading: float = 0.0
    selecting: float = 0.0
    grader_idle: float = 0.0


@dataclasses.dataclass(frozen=True)
class Exploration:
    """A finished search.

    Attributes:
      forest: the trees; every slot is GRADED or VOID, or EMPTY where a tree ended early.
      attempts: of each tree, slot -> what was written there and its grade. VOID nodes are in it, too.
      problems: the trees' problems.
      seconds: where the time went.
      origin: the arguments that made the search, JSON-able.
    """

    forest: Forest
    attempts: list[dict[int, Attempt]]
    problems: Sequence[Problem]
    seconds: Seconds
    origin: Mapping[str, Any]

    def to_saved(self) -> SavedSearch:
        """The same as a search to go on with, in which nothing is left to do: `explore` then asks nobody anything."""
        forest = jax.device_get(self.forest)
        ended = np.asarray(forest.size < forest.nodes)
        return SavedSearch(self.origin, forest, self.attempts, open=[], ungraded=[], ended=ended)


def explore(
    problems: Sequence[Problem],
    writers: Sequence[Writer],
    grader: Grader,
    config: ConfigDict,
    *,
    key: PRNGKeyArray,
    tree_ids: Sequence[int] | None = None,
    capacity: int | None = None,
    reward: str = "all",
    reward_tests: str = "all",
    progress: Callable[[int, int], None] | None = None,
    saved: SavedSearch | None = None,
    suspend: Callable[[], bool] | None = None,
) -> Exploration:
    """Searches one tree of `config.nodes` nodes for each problem.

    A node on which the grader failed (INFRA) is VOID: it keeps its slot, so that such a tree ends with fewer graded
    nodes than `config.nodes`, and a grader that always fails cannot keep a search alive. A tree ends early where the
    limits of depth and width leave no node to expand, and, with `config.stop_when_solved`, once a node earned 1 (nodes
    that are open then are still finished).

    An exception of a writer or of the grader ends the search and is passed on. Tickets may then be open, and neither
    the writers nor the grader should be used for another search.

    Args:
      problems: one tree each; the same problem may come several times.
      writers: the agents, with nothing pending. The index is the agent's number in the forest.
      grader: grades the programs; any exception it raises is passed on.
      config: the section `search` of the configuration: see `mars2_jax.config`.
      key: a typed threefry key. Tree t with n slots in use selects with fold_in(fold_in(fold_in(key, 0), t), n), and
        its slot s is written with fold_in(fold_in(fold_in(key, 1), t), s), where t is its tree id.
      tree_ids: the trees' names in the key, distinct, below 2^31; None is 0, 1, 2, ...
      capacity: trees that the arrays have room for; None is one a problem. It changes no result: searches of one
        capacity share their compiled programs, whatever their numbers of trees.
      reward: what a grade earns, "all" or "fraction" (see `mars2_jax.grading.verdict.reward`).
      reward_tests: the tests that pay, "all" or "public". All tests are run in either case.
      progress: called once a tick with (nodes finished, nodes wanted). Trees that end early lower the second.
      saved: a suspended search to go on with; all other arguments as they were then.
      suspend: asked once a tick; when it says True, the search ends with `Suspended`, and the writers are empty.

    Returns:
      The full trees.

    Raises:
      ValueError: for no problems or writers, tree ids that are not distinct, no room for the trees, a key of another
        kind, or a saved search that was made with other arguments.
      Suspended: on request. What it carries goes on in another process, too (`search.saved`): what was written is
        kept, half a response as well, and only what the grader had not answered is graded again.
    """
    search = _Search(problems, writers, grader, config, key, tree_ids, capacity, (reward, reward_tests))
    if saved is not None:
        search.take_up(saved)
    search.expand()
    while search.open:
        if suspend is not None and suspend():
            raise Suspended(search.suspend())
        search.decode()
        search.use_verdicts()
        search.expand()
        if progress is not None:
            progress(search.finished, search.wanted)
    return search.result()


@dataclasses.dataclass(frozen=True)
class _Awaited:
    """A draft that is with the grader. Its verdict is used at tick `due`."""

    due: int
    node: UngradedNode
    ticket: int


class _Search:
    """The state of a running search, and the three moves of a tick. Trees are numbered by their place in the batch."""

    def __init__(
        self,
        problems: Sequence[Problem],
        writers: Sequence[Writer],
        grader: Grader,
        config: ConfigDict,
        key: PRNGKeyArray,
        tree_ids: Sequence[int] | None,
        capacity: int | None,
        pay: tuple[str, str],
    ) -> None:
        if not problems or not writers:
            raise ValueError(f"a search needs problems and writers, got {len(problems)} and {len(writers)}")
        names = list(range(len(problems)) if tree_ids is None else tree_ids)
        if len(names) != len(problems) or len(set(names)) != len(problems):
            raise ValueError(f"tree_ids must name each of the {len(problems)} trees differently, got {tree_ids}")
        rows = len(problems) if capacity is None else capacity
        if rows < len(problems):
            raise ValueError(f"a capacity of {capacity} has no room for {len(problems)} trees")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or jax.random.key_data(key).shape != (2,):
            raise ValueError(f"a search needs one typed threefry key, got {key}")
        self._problems, self._writers, self._grader, self._pay = problems, writers, grader, pay
        self._key, self._lag, self._nodes = key, config.verdict_lag, config.nodes
        # Nodes of a tree that may be open at a time.
        self._breadth = config.nodes if config.strategy in FLAT else config.in_tree_parallelism
        self._stop_when_solved = config.stop_when_solved
        shape = Shape(config.max_depth, config.max_children, config.guidance, config.guidance_decay)
        self._how = dict(order=config.order, posterior=config.posterior, strategy=config.strategy, shape=shape)
        self._tree_ids = np.zeros(rows, np.int32)
        self._tree_ids[: len(problems)] = names
        self._forest = empty(rows, config.nodes, len(writers))
        self._origin = {
            "problems": [problem.id for problem in problems],
            "trees": self._tree_ids[: len(problems)].tolist(),
            "writers": [writer.name for writer in writers],
            "key": jax.random.key_data(key).tolist(),
            "config": config.to_dict(),
            "pay": list(pay),
        }
        # The host's own record of what the next move needs: reading it from the forest would wait for the device.
        self._used = np.zeros(rows, np.int32)  # slots
        self._busy = np.zeros(rows, np.int32)  # of these, not yet graded
        # Before all slots were used; what no problem has a tree in never begins.
        self._ended = np.arange(rows) >= len(problems)
        self._stuck = np.zeros(rows, bool)  # nothing to expand before the next verdict
        self._open: dict[int, OpenNode] = {}  # by the writers' tickets
        self._awaited: collections.deque[_Awaited] = collections.deque()
        self._attempts: list[dict[int, Attempt]] = [{} for _ in problems]
        self._tick = 0
        self._seconds = Seconds()
        self.finished = 0

    @property
    def open(self) -> int:
        """Nodes that are not graded yet. None after `expand`: the search is over."""
        return int(self._busy.sum())

    @property
    def wanted(self) -> int:
        """Nodes that the trees will have in the end, as far as is known."""
        return int(np.where(self._ended, self._used, self._nodes).sum())

    def expand(self) -> None:
        """Gives each tree that may have another open node one, and its agent the request, in the order of the trees."""
        asked: list[tuple[int, int, int, int, np.ndarray]] = []
        while (idle := self._may_expand()).any():
            with self._timed("selecting"):
                self._forest, grown = _expand(self._forest, self._key, self._tree_ids, idle, **self._how)
                expansion, slots, keys = jax.device_get(grown)
            # The limits left no node to expand. Where none is open either, none will ever be.
            refused = idle & (slots < 0)
            self._stuck |= refused
            self._ended |= refused & (self._busy == 0)
            grew = idle & ~refused
            for tree in np.flatnonzero(grew).tolist():
                where = tree, int(slots[tree]), int(expansion.parent[tree]), int(expansion.agent[tree])
                asked.append((*where, keys[tree]))
            self._busy += grew
            self._used += grew
        # Siblings one after the other: an engine may prefill their common prompt once.
        for tree, slot, parent, agent, key in sorted(asked, key=lambda request: request[:2]):
            self._ask(OpenNode(tree, slot, parent, agent, key, None))

    def _ask(self, node: OpenNode) -> None:
        ticket = node.tree * (self._nodes + 1) + node.slot
        self._open[ticket] = node
        problem, previous = self._problems[node.tree], self._attempts[node.tree].get(node.parent)
        self._writers[node.agent].submit(ticket, problem, previous, node.key, node.so_far)

    def _may_expand(self) -> np.ndarray:
        return (self._busy < self._breadth) & (self._used < self._nodes) & ~self._ended & ~self._stuck

    def decode(self) -> None:
        """One tick: every writer works for a while; what comes out goes to the grader at once."""
        busy = [writer for writer in self._writers if writer.pending]
        with self._timed("decoding"):
            for writer in busy:
                writer.dispatch()
        for writer in busy:
            with self._timed("decoding"):
                drafts = writer.step()
            for draft in drafts:
                node = self._open.pop(draft.ticket)
                self._grade(UngradedNode(node.tree, node.slot, node.parent, node.agent, draft, self._lag))
        self._tick += 1

    def _grade(self, node: UngradedNode) -> None:
        ticket = self._grader.submit(node.draft.program, self._problems[node.tree])
        self._awaited.append(_Awaited(self._tick + node.ticks, node, ticket))

    def use_verdicts(self) -> None:
        """Uses the verdicts that are due, waiting for them; the oldest ones where no writer has work."""
        dry = not any(writer.pending for writer in self._writers)
        if not self._awaited:
            if dry and self._open:
                raise RuntimeError(f"writers have nothing pending, but did not return tickets {sorted(self._open)}")
            return
        due = max(self._tick - 1, self._awaited[0].due if dry else 0)
        # Rounds of at most one node a tree, each one call of `_settle`.
        rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        seen: collections.Counter[int] = collections.Counter()
        while self._awaited and self._awaited[0].due <= due:
            awaited = self._awaited.popleft()
            node = awaited.node
            with self._timed("grading"):
                grade = self._grader.wait(awaited.ticket)
            self._record(node, grade)
            if seen[node.tree] == len(rounds):
                none = np.full(len(self._used), -1, np.int32)
                rounds.append((none, none.copy(), np.zeros(len(self._used), np.float32)))
            observed, voided, rewards = rounds[seen[node.tree]]
            seen[node.tree] += 1
            earned = reward_of(grade, *self._pay)
            if earned is None:
                voided[node.tree] = node.slot
            else:
                observed[node.tree], rewards[node.tree] = node.slot, earned
                self._ended[node.tree] |= self._stop_when_solved and earned >= 1
        with self._timed("selecting"):
            for settled in rounds:
                self._forest = _settle(self._forest, *settled)

    def result(self) -> Exploration:
        return Exploration(self._trees(), self._attempts, self._problems, self._seconds, self._origin)

    def _trees(self) -> Forest:
        """The forest without the rows that no problem has a tree in."""
        trees = len(self._problems)
        return self._forest if trees == len(self._used) else jax.tree.map(lambda x: x[:trees], self._forest)

    def suspend(self) -> SavedSearch:
        """Empties the writers and returns the state; the search is over."""
        responses = {t: c for writer in self._writers if writer.pending for t, c in writer.suspend().items()}
        return SavedSearch(
            origin=self._origin,
            forest=jax.device_get(self._trees()),
            attempts=self._attempts,
            open=[dataclasses.replace(node, so_far=responses[ticket]) for ticket, node in self._open.items()],
            ungraded=[dataclasses.replace(a.node, ticks=a.due - self._tick) for a in self._awaited],
            ended=self._ended[: len(self._problems)],
        )

    def take_up(self, saved: SavedSearch) -> None:
        """Goes on with a saved search; this one has not begun."""
        saved.check(self._origin)
        trees = len(self._problems)
        refill = lambda room, rows: jnp.concatenate([jnp.asarray(rows), room[trees:]])
        self._forest = jax.tree.map(refill, self._forest, saved.forest)
        self._attempts = [dict(attempts) for attempts in saved.attempts]
        self._ended[:trees] = saved.ended
        self._used[:trees] = np.asarray(saved.forest.size)
        self.finished = sum(len(attempts) for attempts in self._attempts)
        for node in saved.open:
            self._busy[node.tree] += 1
            self._ask(node)
        for ungraded in saved.ungraded:
            self._busy[ungraded.tree] += 1
            self._grade(ungraded)

    def _record(self, node: UngradedNode, grade: Grade) -> None:
        above = self._attempts[node.tree].get(node.parent)
        depth = above.depth + 1 if above else 1
        self._attempts[node.tree][node.slot] = Attempt(node.slot, node.parent, node.agent, depth, node.draft, grade)
        self._busy[node.tree] -= 1
        self._stuck[node.tree] = False
        self.finished += 1

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - started
            setattr(self._seconds, what, getattr(self._seconds, what) + took)
            if what == "decoding" and not self._awaited:
                self._seconds.grader_idle += took


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("order", "posterior", "strategy", "shape"))
def _expand(
    forest: Forest,
    key: PRNGKeyArray,
    tree_ids: Int[Array, "trees"],
    idle: Bool[Array, "trees"],
    *,
    order: str,
    posterior: str,
    strategy: str,
    shape: Shape,
) -> tuple[Forest, tuple[Expansion, Int[Array, "trees"], UInt32[Array, "trees 2"]]]:
    """Selection for all trees and a new node for the idle ones: where, in which slot, and the key to write it with."""
    select_key, write_key = (jax.random.fold_in(key, use) for use in (_SELECT, _WRITE))
    how = dict(order=order, posterior=posterior, strategy=strategy, shape=shape)
    expansion = select(forest, select_key, **how, tree_ids=tree_ids)
    forest, slot = reserve(forest, expansion, idle)
    keys = jax.vmap(lambda tree, s: jax.random.fold_in(jax.random.fold_in(write_key, tree), s))(tree_ids, slot)
    return forest, (expansion, slot, jax.random.key_data(keys))


@functools.partial(jax.jit, donate_argnums=0)
def _settle(
    forest: Forest,
    observed: Int[Array, "trees"],
    voided: Int[Array, "trees"],
    rewards: Float[Array, "trees"],
) -> Forest:
    """At most one verdict a tree; slot -1 is none. One shape, hence one compilation, for any number of verdicts."""
    trees = jnp.arange(forest.trees)
    return void(observe(forest, trees, observed, rewards), trees, voided)
