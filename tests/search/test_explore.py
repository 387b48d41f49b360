"""Exploration with scripted writers and a scripted grader: what it promises about order, timing and failures."""

from __future__ import annotations

import hashlib
import random
import threading
import time

import jax
import numpy as np
import pytest

from mars2_jax.config import default_config
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.rollout.types import Completion
from mars2_jax.search.explore import Exploration, explore
from mars2_jax.search.forest import Status
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.problem import CallTest, Problem

pytestmark = pytest.mark.usefixtures("quick_compiles")

KEY = jax.random.key(3)


def problem(number: int) -> Problem:
    return Problem(
        id=f"p{number}", statement="", public=(CallTest((1,), 1),), hidden=(CallTest((2,), 2),), entry_point="f"
    )


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])


def completion(tokens: int) -> Completion:
    response = np.zeros(tokens, np.int32)
    return Completion(0, np.zeros(1, np.int32), response, *(response.astype(np.float32),) * 2, finish="stop")


class ScriptedWriter:
    """Two slots, as an engine has; a request takes 1 to 4 steps in a slot, by its key. Its text names its history."""

    def __init__(self, name: str, log: list[tuple]) -> None:
        self.name, self._log = name, log
        self._queue: list[tuple[int, int, int, str]] = []  # ticket, steps to go, steps done, text
        self._running: list[list] = []
        self.steps = 0

    def submit(
        self, ticket: int, problem: Problem, previous: Attempt | None, key: np.ndarray, so_far: Completion | None = None
    ) -> None:
        assert key.shape == (2,) and key.dtype == np.uint32
        text = f"{self.name} {problem.id} after [{previous.draft.text if previous else ''}] {digest(key.tolist())}"
        self._log.append((self.name, ticket, text))
        made = 0 if so_far is None else len(so_far.tokens)
        self._queue.append((ticket, 1 + digest(key.tolist()) % 4 - made, made, text))

    def dispatch(self) -> None:
        pass

    def suspend(self) -> dict[int, Completion | None]:
        """What a request has is one token a step; what waits in the queue has nothing to keep."""
        kept: dict[int, Completion | None] = {ticket: None for ticket, *_ in self._queue}
        kept |= {ticket: completion(made) for ticket, _, made, _ in self._running}
        self._queue, self._running = [], []
        return kept

    def step(self) -> list[Draft]:
        while self._queue and len(self._running) < 2:
            self._running.append(list(self._queue.pop(0)))
        for request in self._running:
            request[1] -= 1
            request[2] += 1
        self.steps += len(self._running)
        done = [request for request in self._running if not request[1]]
        self._running = [request for request in self._running if request[1]]
        return [Draft(ticket, text, text, completion(made)) for ticket, _, made, text in done]

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._running)


class ScriptedGrader:
    """The verdict follows from the program; when it comes is random."""

    def __init__(self, delays: random.Random | None = None, infra: int = 0) -> None:
        self._delays, self._infra = delays, infra
        self._grades: dict[int, tuple[threading.Timer | None, Grade]] = {}
        self.submitted: list[str] = []

    def submit(self, program: str, problem: Problem) -> int:
        timer = None
        if self._delays is not None:
            timer = threading.Timer(self._delays.choice([0, 0.001, 0.01]), lambda: None)
            timer.start()
        if self._infra and digest("infra", program) % self._infra == 0:
            grade = Grade(Verdict.INFRA)
        else:
            public, hidden = (Verdict.PASS if digest(t, program) % 2 else Verdict.WRONG for t in ("public", "hidden"))
            verdict = next((v for v in (public, hidden) if v is not Verdict.PASS), Verdict.PASS)
            grade = Grade(verdict, (TestResult(public),), (TestResult(hidden),))
        self.submitted.append(program)
        self._grades[len(self.submitted)] = (timer, grade)
        return len(self.submitted)

    def wait(self, ticket: int) -> Grade:
        timer, grade = self._grades.pop(ticket)
        if timer is not None:
            timer.join()
        return grade


def search(
    trees=5, agents=2, grader=None, tree_ids=None, log=None, problems=None, reward_tests="all", **changes
) -> Exploration:
    config = default_config().search
    config.update(changes)
    log = [] if log is None else log
    writers = [ScriptedWriter(f"w{a}", log) for a in range(agents)]
    problems = [problem(i) for i in range(trees)] if problems is None else problems
    return explore(
        problems,
        writers,
        grader or ScriptedGrader(),
        config,
        key=KEY,
        tree_ids=tree_ids,
        reward="fraction",
        reward_tests=reward_tests,
    )


def equal(a: Exploration, b: Exploration) -> bool:
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), a.forest, b.forest)
    grades = [{s: x.grade for s, x in tree.items()} for tree in a.attempts] == [
        {s: x.grade for s, x in tree.items()} for tree in b.attempts
    ]
    return jax.tree.all(same) and grades


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("changes", [dict(strategy="mars2"), dict(strategy="flat_multi"), dict(in_tree_parallelism=3)])
def test_results_and_order_do_not_depend_on_the_graders_speed(changes, lag):
    runs = []
    for delays in (None, random.Random(1), random.Random(2)):
        log: list[tuple] = []
        grader = ScriptedGrader(delays)
        result = search(grader=grader, log=log, verdict_lag=lag, **changes)
        runs.append((result, log, grader.submitted))
    for result, log, submitted in runs[1:]:
        assert equal(result, runs[0][0])
        assert log == runs[0][1]
        assert submitted == runs[0][2]


def test_trees_are_full_and_attempts_mirror_the_forest():
    result = search(order="node_first", posterior="gaussian")
    forest = jax.device_get(result.forest)
    assert (forest.status[:, 1:] == Status.GRADED).all() and not forest.graded[:, 0].any()
    assert forest.depth.max() > 1
    for tree, attempts in enumerate(result.attempts):
        assert sorted(attempts) == list(range(1, 9))
        for slot, attempt in attempts.items():
            assert attempt.slot == slot
            assert attempt.parent == forest.parent[tree, slot]
            assert attempt.agent == forest.agent[tree, slot]
            assert attempt.depth == forest.depth[tree, slot]
            passed = [r.verdict is Verdict.PASS for r in attempt.grade.public + attempt.grade.hidden]
            assert forest.reward[tree, slot] == np.mean(passed)
            # The writer was shown the parent's text, and nothing else.
            above = attempts[attempt.parent].draft.text if attempt.parent else ""
            assert attempt.draft.text.startswith(f"w{attempt.agent} p{tree} after [{above}] ")


def test_a_tree_does_not_depend_on_the_other_trees():
    """Same problem, same id: the same tree wherever it stands, although the writers' queues differ."""
    one = search(tree_ids=[7, 5, 9, 11, 2])
    other = search(problems=[problem(i) for i in (8, 6, 7, 9, 2)], tree_ids=[0, 1, 2, 3, 9])
    for a, b in zip(jax.tree.leaves(one.forest), jax.tree.leaves(other.forest), strict=True):
        np.testing.assert_array_equal(a[2], b[4])
    assert [x.draft.text for x in one.attempts[2].values()] == [x.draft.text for x in other.attempts[4].values()]


def test_keys_of_requests():
    log: list[tuple] = []
    result = search(tree_ids=[40, 50, 2, 3, 4], log=log)
    for tree, tree_id in enumerate((40, 50)):
        for slot, attempt in result.attempts[tree].items():
            key = KEY
            for part in (1, tree_id, slot):
                key = jax.random.fold_in(key, part)
            assert attempt.draft.text.endswith(str(digest(jax.random.key_data(key).tolist())))


class TickingWriter(ScriptedWriter):
    """Notes at which of its steps each ticket came in and went out."""

    def __init__(self) -> None:
        super().__init__("w", [])
        self.tick, self.asked, self.answered = 0, {}, {}

    def submit(self, ticket, *rest):
        self.asked[ticket] = self.tick
        super().submit(ticket, *rest)

    def step(self):
        drafts = super().step()
        self.answered |= {draft.ticket: self.tick for draft in drafts}
        self.tick += 1
        return drafts

    def gaps(self) -> list[int]:
        """Steps from the end of a node to the request for the next of its tree, in the order of the ends."""
        return [self.asked[t + 1] - self.answered[t] for t in self.answered if t + 1 in self.asked]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_verdict_is_used_exactly_lag_steps_later(lag):
    """While the other trees keep the writer busy. With lag 0 the next request is there at the next step."""
    writer = TickingWriter()
    config = default_config().search
    config.update(verdict_lag=lag)
    explore([problem(i) for i in range(5)], [writer], ScriptedGrader(), config, key=KEY)
    gaps = writer.gaps()
    # In the first half of the search no tree is full, and the writer never runs dry.
    assert set(gaps[: len(gaps) // 2]) == {lag + 1}


def test_a_verdict_is_used_at_once_where_the_writers_have_run_dry():
    writer = TickingWriter()
    config = default_config().search
    config.update(verdict_lag=1000)
    explore([problem(0)], [writer], ScriptedGrader(), config, key=KEY)
    assert writer.gaps() == [1] * 7


def test_infra_nodes_are_void():
    result = search(grader=ScriptedGrader(infra=3))
    forest = jax.device_get(result.forest)
    voids = forest.status == Status.VOID
    assert voids.any() and (forest.status[:, 1:] != Status.PENDING).all()
    for tree, attempts in enumerate(result.attempts):
        assert len(attempts) == 8
        for slot, attempt in attempts.items():
            assert voids[tree, slot] == (attempt.grade.verdict is Verdict.INFRA)
            assert not attempt.parent or not voids[tree, attempt.parent]
    # What a void node might have added is nowhere.
    np.testing.assert_array_equal(forest.stats.agent[:, 0].sum(-1), forest.graded.sum(-1))
    assert (forest.reward[voids] == 0).all()


def test_a_grader_that_always_fails_ends_the_search():
    forest = search(grader=ScriptedGrader(infra=1)).forest
    assert (np.asarray(forest.status[:, 1:]) == Status.VOID).all()


def test_grpo_is_flat_and_asks_at_once():
    log: list[tuple] = []
    grader = ScriptedGrader()
    result = search(strategy="flat_multi", log=log, grader=grader)
    forest = jax.device_get(result.forest)
    assert (forest.depth[:, 1:] == 1).all() and (forest.parent[:, 1:] == 0).all()
    assert (forest.agent[:, 1:] == np.arange(8) % 2).all()
    # Nothing waits for a verdict: tickets enter in order, siblings together.
    assert [ticket for _, ticket, _ in log] == [tree * 9 + slot for tree in range(5) for slot in range(1, 9)]


@pytest.mark.parametrize("breadth", [2, 5])
def test_in_tree_parallelism_keeps_so_many_nodes_open(breadth):
    class Counting(ScriptedGrader):
        """Counts the nodes of the one tree that were asked for and not judged."""

        most = 0

        def wait(self, ticket):
            self.most = max(self.most, len(log) - self.waited)
            self.waited += 1
            return super().wait(ticket)

        waited = 0

    log: list[tuple] = []
    grader = Counting()
    result = search(trees=1, log=log, grader=grader, in_tree_parallelism=breadth)
    assert grader.most == breadth
    forest = jax.device_get(result.forest)
    assert forest.graded[:, 1:].all()
    # Nothing is built on what was not graded yet: the writer was shown every parent's text.
    assert forest.depth.max() > 1
    for attempt in result.attempts[0].values():
        above = result.attempts[0][attempt.parent].draft.text if attempt.parent else ""
        assert f"after [{above}] " in attempt.draft.text


@pytest.mark.parametrize("breadth", [1, 3])
def test_a_solved_tree_ends(breadth):
    calls: list[tuple[int, int]] = []
    config = default_config().search
    config.update(stop_when_solved=True, in_tree_parallelism=breadth)
    writers = [ScriptedWriter(f"w{a}", []) for a in range(2)]
    problems = [problem(i) for i in range(8)]
    result = explore(problems, writers, ScriptedGrader(), config, key=KEY, progress=lambda *pair: calls.append(pair))
    forest = jax.device_get(result.forest)
    solved = (forest.reward == 1).any(-1)
    sizes = (forest.status[:, 1:] != Status.EMPTY).sum(-1)
    assert solved.any() and (forest.status != Status.PENDING).all()
    assert (sizes[~solved] == 8).all() and (sizes[solved] < 8).any()
    for tree in np.flatnonzero(solved):
        first = int(np.argmax(forest.reward[tree] == 1))
        # What was open when the solution was found is finished, and nothing else.
        assert first <= sizes[tree] <= first + 2 * (breadth - 1) + (breadth > 1)
    assert [len(attempts) for attempts in result.attempts] == sizes.tolist()
    assert calls[-1] == (sizes.sum(), sizes.sum())


def test_limits_end_a_tree_that_void_nodes_left_without_room():
    """Two levels of two hold six nodes; below a void node there are none."""
    result = search(grader=ScriptedGrader(infra=3), max_depth=2, max_children=2, nodes=6)
    forest = jax.device_get(result.forest)
    sizes = (forest.status[:, 1:] != Status.EMPTY).sum(-1)
    voids = ((forest.status == Status.VOID) & (forest.depth == 1)).sum(-1)
    assert voids.any()
    np.testing.assert_array_equal(sizes, 6 - 2 * voids)
    assert forest.depth.max() == 2


def test_limits_wait_for_open_nodes():
    """With room for one child a node and three open at a time, each node must wait for the one before."""
    result = search(trees=2, max_children=1, in_tree_parallelism=3)
    forest = jax.device_get(result.forest)
    np.testing.assert_array_equal(forest.parent[:, 1:], np.tile(np.arange(8), (2, 1)))


def test_reward_tests_public():
    result = search(reward_tests="public")
    for tree, attempts in enumerate(result.attempts):
        for slot, attempt in attempts.items():
            assert result.forest.reward[tree, slot] == float(attempt.grade.public_pass)


@pytest.mark.parametrize("where", ["submit", "wait"])
def test_an_exception_of_the_grader_is_passed_on(where, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the service is gone")

    grader = ScriptedGrader()
    monkeypatch.setattr(grader, where, fail)
    with pytest.raises(OSError, match="service is gone"):
        search(grader=grader)


def test_a_writer_that_loses_a_ticket_is_an_error():
    class Forgetful(ScriptedWriter):
        def step(self):
            return super().step()[1:]

    config = default_config().search
    with pytest.raises(RuntimeError, match="did not return tickets"):
        explore([problem(0)], [Forgetful("w", [])], ScriptedGrader(), config, key=KEY)


def test_progress_and_seconds():
    calls: list[tuple[int, int]] = []
    config = default_config().search
    started = time.perf_counter()
    result = explore(
        [problem(i) for i in range(5)],
        [ScriptedWriter("v", []), ScriptedWriter("w", [])],
        ScriptedGrader(random.Random(0)),
        config,
        key=KEY,
        progress=lambda done, wanted: calls.append((done, wanted)),
    )
    wall = time.perf_counter() - started
    assert calls[-1] == (40, 40) and calls == sorted(calls)
    spent = result.seconds
    assert spent.grading > 0 and spent.selecting > 0 and spent.decoding + spent.grading + spent.selecting < wall
    assert 0 < spent.grader_idle <= spent.decoding


def test_the_grader_is_idle_while_nothing_was_written_and_no_longer():
    """One tree, one writer that takes a while: its first step has nothing for the grader, and a tree is a chain."""

    class Slow(ScriptedWriter):
        def step(self):
            time.sleep(0.02)
            return super().step()

    writer = Slow("w", [])
    config = default_config().search
    config.update(verdict_lag=3)
    spent = explore([problem(0)], [writer], ScriptedGrader(), config, key=KEY).seconds
    # Once a program is there, the writer has run dry, and the verdict is used before it steps again.
    assert spent.grader_idle == spent.decoding > 0
    busy = explore([problem(i) for i in range(5)], [Slow("w", [])], ScriptedGrader(), config, key=KEY).seconds
    assert busy.grader_idle < 0.8 * busy.decoding


@pytest.mark.parametrize(
    "change",
    [dict(trees=0), dict(agents=0), dict(tree_ids=[1, 1, 2, 3, 4]), dict(tree_ids=[1]), dict(order="sideways")],
)
def test_wrong_arguments(change):
    with pytest.raises(ValueError):
        search(**change)


def test_a_raw_key_is_refused():
    with pytest.raises(ValueError, match="typed threefry key"):
        explore(
            [problem(0)],
            [ScriptedWriter("w", [])],
            ScriptedGrader(),
            default_config().search,
            key=jax.random.PRNGKey(0),
        )
