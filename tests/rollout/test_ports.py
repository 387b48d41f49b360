"""Two users of one engine: each gets what an engine of its own would have given it."""

import collections
import dataclasses
import random

import numpy as np
import pytest
from flax import nnx

from mars2_jax.errors import PromptTooLong
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.ports import SharedEngine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.tiny import TINY, random_decoder

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def decoder():
    return nnx.merge(*random_decoder())


def engine(decoder) -> Engine:
    return Engine(decoder, slots=4, chunk=4, capacity=96, stop_ids=(0, 1))


def request(user: int, i: int) -> Request:
    """The users' ids clash, their prompts and keys differ."""
    rng = np.random.default_rng([user, i])
    prompt = rng.integers(2, TINY.vocab_size, rng.integers(1, 30)).astype(np.int32)
    return Request(i, prompt, np.asarray([user, i], np.uint32), SamplingParams(max_new_tokens=int(rng.integers(1, 20))))


def alone(engine, requests) -> dict:
    for r in requests:
        engine.submit(r)
    done = {}
    while engine.pending:
        done |= {c.id: c for c in engine.step()}
    return done


def interrupt(port, requests) -> None:
    """Takes requests out, half done, and asks for the rest of them."""
    pending = port.pending
    for r in requests:
        so_far = port.abort(r.id)
        assert so_far.id == r.id and so_far.finish == "abort" and port.abort(r.id) is None
        port.submit(dataclasses.replace(r, so_far=so_far))
        with pytest.raises(ValueError, match=f"request {r.id} is open already"):
            port.submit(r)
    assert port.pending == pending and requests


def test_tokens_are_those_of_engines_of_their_own(decoder):
    asked = {user: [request(user, i) for i in range(9)] for user in (0, 1)}
    apart = {user: alone(engine(decoder), requests) for user, requests in asked.items()}
    shared = SharedEngine(engine(decoder))
    ports = {user: shared.port() for user in asked}
    got = {user: {} for user in asked}
    # In three waves, so that one may be idle while the other works.
    for wave in range(3):
        for user, port in ports.items():
            for r in asked[user][3 * wave : 3 * wave + 3]:
                port.submit(r)
            assert port.pending == 3
        first = True
        while any(port.pending for port in ports.values()):
            busy = {user: port for user, port in ports.items() if port.pending}
            for port in busy.values():
                port.dispatch()
            for user, port in busy.items():
                for completion in port.step():
                    assert completion.id not in got[user]
                    got[user][completion.id] = completion
            if first:
                interrupt(ports[0], [r for r in asked[0][3 * wave : 3 * wave + 3] if r.id not in got[0]])
            first = False
    for user, requests in asked.items():
        assert got[user].keys() == apart[user].keys() == {r.id for r in requests}
        for r in requests:
            mine, other = got[user][r.id], apart[user][r.id]
            np.testing.assert_array_equal(mine.prompt, r.prompt)
            np.testing.assert_array_equal(mine.tokens, other.tokens)
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
            assert mine.finish == other.finish
    assert shared.engine.pending == 0


class CountingEngine:
    """Every request takes `length` steps."""

    def __init__(self):
        self.steps, self._open = 0, collections.OrderedDict()

    @property
    def pending(self):
        return len(self._open)

    def submit(self, request):
        if request.sampling.max_new_tokens > 50:
            raise PromptTooLong("too long")
        assert request.id not in self._open
        self._open[request.id] = [request, request.sampling.max_new_tokens]

    def step(self):
        self.steps += 1
        for entry in self._open.values():
            entry[1] -= 1
        done = [number for number, (_, left) in self._open.items() if left == 0]
        return [self._open.pop(number)[0] for number in done]  # a request has an id, which is all that counts here

    def abort(self, number):
        return self._open.pop(number)[0]


def takes(i: int, steps: int) -> Request:
    return Request(i, np.ones(1, np.int32), np.zeros(2, np.uint32), SamplingParams(max_new_tokens=steps))


def test_the_engine_works_once_a_turn_whoever_is_there():
    rng = random.Random(0)
    shared = SharedEngine(CountingEngine())
    ports = [shared.port() for _ in range(3)]
    sent, got, turns = [0] * 3, [[], [], []], 0
    while turns < 300:
        for user, port in enumerate(ports):
            if rng.random() < 0.2:
                port.submit(takes(sent[user], rng.randint(1, 4)))
                sent[user] += 1
        busy = [user for user, port in enumerate(ports) if port.pending]
        for i in range(sent[busy[0]]) if busy and rng.random() < 0.1 else []:
            # All that one user has open, as a search that is suspended does.
            if (request := ports[busy[0]].abort(i)) is not None:
                assert request.id == i
                got[busy[0]].append(i)
        busy = [user for user in busy if ports[user].pending]
        for user in busy:
            got[user] += [done.id for done in ports[user].step()]
        turns += bool(busy)
        assert shared.engine.steps == turns
    for user, port in enumerate(ports):
        assert port.abort(10**6) is None
        while port.pending:
            got[user] += [done.id for done in port.step()]
        assert sorted(got[user]) == list(range(sent[user])) and sent[user] > 30


def test_a_refused_request_is_not_waited_for():
    port = SharedEngine(CountingEngine()).port()
    with pytest.raises(PromptTooLong):
        port.submit(takes(0, 51))
    assert port.pending == 0


def test_a_completion_that_waits_for_its_port_can_still_be_taken_out():
    shared = SharedEngine(CountingEngine())
    first, second = shared.port(), shared.port()
    first.submit(takes(0, 2))
    second.submit(takes(0, 1))
    assert first.step() == [] and second.pending == 1
    assert second.abort(0).id == 0
    assert second.pending == 0 and second.step() == []
    assert [done.id for done in first.step()] == [0]
