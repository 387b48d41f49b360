"""Ten thousand requests of every kind: no slot is lost, and every answer is the one that the request has alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mars2_jax.errors import PromptTooLong
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Completion, Request, SamplingParams
from tests.models.tiny import TINY, tiny_decoder

CAPACITY, SLOTS = 96, 8
SAMPLING = (
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=1.0, top_p=0.95),
    dict(temperature=1.0, top_k=50),
    dict(temperature=0.7, min_p=0.1, stop=("<7><7>",)),
)


def text(tokens: np.ndarray) -> str:
    return "".join(f"<{token}>" for token in tokens)


def engine(decoder, slots: int, stop_ids=(0, 1)) -> Engine:
    options = dict(chunk=4, capacity=CAPACITY, stop_ids=stop_ids, detokenize=text, prompt_memory=512)
    return Engine(decoder, slots=slots, **options)


def make_pool(rng: np.random.Generator, decoder) -> list[tuple[Request, Completion]]:
    """Requests and their answers alone. Every eighth asks for one token; some share prompts; some stop at once."""
    prompts = [rng.integers(2, TINY.vocab_size, rng.integers(1, 60)).astype(np.int32) for _ in range(60)]
    alone, pool = engine(decoder, 1), []
    for i in range(160):
        sampling = SamplingParams(max_new_tokens=1 if i % 8 == 0 else int(rng.integers(1, 36)), **SAMPLING[i % 5])
        request = Request(i, prompts[i % len(prompts)], rng.integers(0, 2**32, 2, np.uint32), sampling)
        alone.submit(request)
        done: list[Completion] = []
        while alone.pending:
            done += alone.step()
        pool.append((request, done[0]))
    return pool


def check(got: Completion, want: Completion, whole: bool) -> None:
    count = len(got.tokens)
    np.testing.assert_array_equal(got.tokens, want.tokens[:count])
    np.testing.assert_allclose(got.logprobs, want.logprobs[:count], atol=1e-4)
    np.testing.assert_allclose(got.scores, want.scores[:count], atol=1e-4)
    if whole:
        assert count == len(want.tokens) and got.finish == want.finish


def soak(total: int) -> None:
    rng = np.random.default_rng(0)
    decoder = tiny_decoder()
    pool = make_pool(rng, decoder)
    assert {c.finish for _, c in pool} == {"stop", "length"}
    assert any(len(c.tokens) == 1 and c.finish == "stop" for _, c in pool), "none stops at once"
    one = engine(decoder, SLOTS)
    open_requests: dict[int, int] = {}  # id -> number in the pool
    suspended: list[tuple[int, Completion]] = []
    submitted = answered = aborted = taken_up = 0

    def bad_request() -> None:
        request, _ = pool[0]
        kind = rng.integers(4)
        if kind == 0:
            with pytest.raises(PromptTooLong):
                one.submit(dataclasses.replace(request, id=-1, prompt=np.full(CAPACITY, 5, np.int32)))
        elif kind == 1:
            with pytest.raises(ValueError, match="max_new_tokens"):
                SamplingParams(max_new_tokens=0)
        elif kind == 2:
            with pytest.raises(ValueError, match="empty"):
                one.submit(dataclasses.replace(request, id=-1, prompt=np.zeros(0, np.int32)))
        elif open_requests:
            with pytest.raises(ValueError, match="open already"):
                one.submit(dataclasses.replace(request, id=next(iter(open_requests))))

    while answered + aborted < total:
        for _ in range(rng.integers(0, 2 * SLOTS)):
            if submitted - aborted >= total + len(suspended):
                break
            if suspended and rng.random() < 0.5:
                number, so_far = suspended.pop()
                request = dataclasses.replace(pool[number][0], id=submitted, so_far=so_far)
                taken_up += 1
            else:
                number = int(rng.integers(len(pool)))
                request = dataclasses.replace(pool[number][0], id=submitted)
            one.submit(request)
            open_requests[submitted] = number
            submitted += 1
        if rng.random() < 0.2:
            bad_request()
        if rng.random() < 0.3:
            one.dispatch()
        for _ in range(rng.integers(0, 3)):
            if not open_requests or rng.random() < 0.5:
                break
            victim = int(rng.choice(list(open_requests)))
            part, number = one.abort(victim), open_requests.pop(victim)
            assert part is not None and part.id == victim
            check(part, pool[number][1], whole=part.finish != "abort")
            aborted += 1
            if part.finish == "abort":
                suspended.append((number, part))
        for completion in one.step():
            check(completion, pool[open_requests.pop(completion.id)][1], whole=True)
            answered += 1
        assert one.pending == len(open_requests)
    for completion in (c for _ in range(1000) if one.pending for c in one.step()):
        check(completion, pool[open_requests.pop(completion.id)][1], whole=True)
    assert one.pending == 0 and not open_requests and aborted > total // 20 and taken_up > total // 50
    # Every slot still works: as many requests as there are slots are answered side by side.
    for i in range(SLOTS):
        one.submit(dataclasses.replace(pool[0][0], id=i, sampling=SamplingParams(temperature=0.0, max_new_tokens=1)))
    assert len(one.step()) == SLOTS


def test_a_hundred_requests():
    soak(100)


@pytest.mark.slow
def test_ten_thousand_requests():
    soak(10_000)
