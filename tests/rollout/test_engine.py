import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.errors import PromptTooLong
from mars2_jax.rollout import programs
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.tiny import TINY, logits, tiny_decoder

STOPS = (0, 1)
CAPACITY = 96


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def engine(decoder, slots=8, chunk=4, **options) -> Engine:
    return Engine(decoder, slots=slots, chunk=chunk, capacity=CAPACITY, stop_ids=STOPS, **options)


def request(i, length=5, seed=None, **sampling) -> Request:
    rng = np.random.default_rng(1000 + (i if seed is None else seed))
    prompt = rng.integers(2, TINY.vocab_size, length).astype(np.int32)
    return Request(i, prompt, np.asarray([7, i], np.uint32), SamplingParams(**{"max_new_tokens": 12} | sampling))


def run(engine, requests) -> dict:
    for r in requests:
        engine.submit(r)
    done = {}
    while engine.pending:
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    assert set(done) == {r.id for r in requests}
    return done


SAMPLING = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=1.0, top_p=0.95),
    dict(temperature=0.8, top_k=50),
    dict(temperature=1.0, min_p=0.05),
]


def test_tokens_do_not_depend_on_slot_neighbours_or_batch(decoder):
    requests = [
        request(i, length=1 + (7 * i) % 40, max_new_tokens=1 + (5 * i) % 30, **SAMPLING[i % len(SAMPLING)])
        for i in range(32)
    ]
    together = run(engine(decoder), requests)
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(32)]
    again = run(engine(decoder, slots=5, chunk=7), shuffled)
    alone = engine(decoder, slots=1)
    for r in requests:
        one = run(alone, [r])[r.id]
        for other in (together[r.id], again[r.id]):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            assert one.finish == other.finish


def test_scores_equal_a_fresh_forward_pass(decoder):
    requests = [request(i, length=3 + i, max_new_tokens=16, temperature=0.7 + 0.1 * i) for i in range(6)]
    for r in requests:
        c = run(engine(decoder), [r])[r.id]
        sequence = np.concatenate([c.prompt, c.tokens])
        rows = logits(decoder, sequence)[len(c.prompt) - 1 : -1]
        at = lambda x, c=c: np.asarray(jax.nn.log_softmax(x, axis=-1))[np.arange(len(c.tokens)), c.tokens]
        np.testing.assert_allclose(c.scores, at(rows), atol=1e-4)
        np.testing.assert_allclose(c.logprobs, at(rows / r.sampling.temperature), atol=1e-4)


def test_greedy_equals_argmax_of_the_forward_pass(decoder):
    r = request(3, length=9, temperature=0.0, max_new_tokens=20)
    c = run(engine(decoder), [r])[3]
    # Under causality one pass over all of it gives what a pass over each beginning would.
    rows = logits(decoder, [*r.prompt, *c.tokens])[len(r.prompt) - 1 : -1]
    np.testing.assert_array_equal(c.tokens, np.argmax(rows, axis=-1))
    assert c.finish == ("stop" if c.tokens[-1] in STOPS else "length")


def test_stop_tokens_and_budgets(decoder):
    done = run(engine(decoder), [request(i, temperature=1.5, max_new_tokens=1 + i) for i in range(40)])
    assert {c.finish for c in done.values()} == {"stop", "length"}
    for i, c in done.items():
        assert 1 <= len(c.tokens) <= 1 + i
        assert not set(c.tokens[:-1]) & set(STOPS)
        assert (c.finish == "stop") == (c.tokens[-1] in STOPS)
        if c.finish == "length":
            assert len(c.tokens) == 1 + i


def test_another_stop_set_needs_no_other_program_and_is_honoured(decoder):
    r = request(5, temperature=0.0, max_new_tokens=30)
    free = Engine(decoder, slots=2, chunk=4, capacity=CAPACITY, stop_ids=(63, 62))
    long = run(free, [r])[5]
    compiled = programs.compilations()
    stop = int(long.tokens[4])
    cut = run(Engine(decoder, slots=2, chunk=4, capacity=CAPACITY, stop_ids=(stop, 62)), [r])[5]
    first = long.tokens.tolist().index(stop)
    np.testing.assert_array_equal(cut.tokens, long.tokens[: first + 1])
    assert programs.compilations() == compiled


def test_stop_strings_cut_after_the_token_that_completes_them(decoder):
    spell = lambda tokens: "".join(chr(ord("A") + t % 26) for t in tokens)
    new = lambda: Engine(decoder, slots=4, chunk=4, capacity=CAPACITY, stop_ids=(), detokenize=spell)
    r = request(5, temperature=1.0, max_new_tokens=30)
    full = run(new(), [r])[5]
    assert len(full.tokens) == 30
    text = spell(full.tokens)
    stop = text[5:7]
    cut = request(5, temperature=1.0, max_new_tokens=30, stop=("~", stop))
    c = run(new(), [cut, request(6)])[5]
    assert c.finish == "stop"
    assert spell(c.tokens) == text[: text.index(stop) + 2]
    np.testing.assert_array_equal(c.tokens, full.tokens[: len(c.tokens)])
    assert len(c.logprobs) == len(c.scores) == len(c.tokens)
    with pytest.raises(ValueError, match="detokenize"):
        engine(decoder).submit(cut)


def test_finished_slots_are_refilled_and_prompts_prefilled_once(decoder):
    e = engine(decoder, slots=2)
    same = [request(i, length=20, seed=1) for i in range(6)]
    run(e, same)
    assert e.prefilled_tokens == 19
    run(e, [request(10, length=20, seed=1)])
    assert e.prefilled_tokens == 19
    e.set_params(e.params)
    run(e, [request(11, length=20, seed=1)])
    assert e.prefilled_tokens == 38


def test_siblings_of_one_prompt_differ_by_their_keys(decoder):
    done = run(engine(decoder), [request(i, seed=1, temperature=1.0) for i in range(8)])
    assert len({c.tokens.tobytes() for c in done.values()}) > 4


def test_weights_take_effect_and_never_in_mid_flight(decoder):
    e = engine(decoder)
    before = run(e, [request(1, temperature=0.0)])[1]
    e.submit(request(2))
    other = nnx.state(tiny_decoder(seed=9))
    with pytest.raises(RuntimeError, match="1 requests are open"):
        e.set_params(other)
    while e.pending:
        e.step()
    e.set_params(other)
    after = run(e, [request(1, temperature=0.0)])[1]
    assert before.tokens.tolist() != after.tokens.tolist()
    expected = run(engine(tiny_decoder(seed=9)), [request(1, temperature=0.0)])[1]
    np.testing.assert_array_equal(after.tokens, expected.tokens)


def test_bad_requests_are_refused_and_leave_the_engine_as_it_was(decoder):
    e = engine(decoder)
    with pytest.raises(PromptTooLong, match="a prompt of 90 tokens with a budget of 12"):
        e.submit(request(0, length=90))
    with pytest.raises(ValueError, match="empty"):
        e.submit(request(0, length=0))
    with pytest.raises(ValueError, match="token ids"):
        e.submit(dataclasses.replace(request(0), prompt=np.asarray([TINY.vocab_size], np.int32)))
    for key in (np.zeros(4, np.uint32), np.asarray([-1, 3]), jax.random.key(0)):
        with pytest.raises(ValueError, match=r"key must be uint32\[2\]"):
            e.submit(dataclasses.replace(request(0), key=key))
    assert e.pending == 0 and e.step() == []
    exact = request(0, length=CAPACITY - 12, temperature=0.0)
    assert len(run(e, [exact])[0].tokens) > 0


def test_a_full_cache_gives_the_same_tokens_as_a_roomy_one(decoder):
    r = request(0, length=CAPACITY - 40, temperature=1.0, max_new_tokens=40)
    tight = run(engine(decoder), [r])[0]
    roomy = run(Engine(decoder, slots=3, chunk=4, capacity=400, stop_ids=STOPS), [request(1, length=300), r])[0]
    np.testing.assert_array_equal(tight.tokens, roomy.tokens)


def test_no_compilation_after_warm_up(decoder):
    e = engine(decoder, slots=4)
    mixed = lambda offset: [
        request(offset + i, length=1 + (11 * i) % 60, max_new_tokens=1 + (7 * i) % 30, **SAMPLING[i % len(SAMPLING)])
        for i in range(100)
    ]
    run(e, mixed(0))
    compiled = programs.compilations()
    run(e, mixed(1000))
    assert programs.compilations() == compiled


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(min_p=1.0),
        dict(top_k=-1),
        dict(top_k=2**31),
        dict(stop=("",)),
    ],
)
def test_sampling_parameters_out_of_range(bad):
    with pytest.raises(ValueError):
        SamplingParams(**bad)
    with pytest.raises(ValueError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)


def test_bfloat16_engine(decoder):
    graphdef, params = nnx.split(decoder)
    half = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    half.dtype = jnp.bfloat16
    c = run(engine(half), [request(0, temperature=1.0)])[0]
    assert np.isfinite(c.logprobs).all() and c.logprobs.dtype == np.float32


def test_prompts_that_the_memory_has_no_room_for_are_prefilled_again(decoder):
    e = engine(decoder, slots=1, prompt_memory=128)  # two prompts, padded to 64 tokens each
    for seed in (1, 2, 3, 3, 2, 1):
        run(e, [request(seed, length=20, seed=seed)])
    assert e.prefilled_tokens == 4 * 19


def test_aborted_requests_free_their_slots_and_go_on_where_they_stopped(decoder):
    requests = [request(i, length=3 + i, max_new_tokens=20, **SAMPLING[i % len(SAMPLING)]) for i in range(6)]
    whole = run(engine(decoder), requests)
    busy = engine(decoder, slots=4)
    for r in requests:
        busy.submit(r)
    early = {c.id: c for c in busy.step()}
    # One in the queue, one that decodes, one whose chunk is under way, and none of these.
    assert busy.abort(99) is None
    queued = busy.abort(5)
    assert queued.finish == "abort" and len(queued.tokens) == 0
    assert busy.abort(5) is None
    parts = {5: queued}
    running = [r.id for r in requests[:4] if r.id not in early]
    for i in running[:2]:
        parts[i] = busy.abort(i)
        busy.dispatch()
    done = early | {c.id: c for c in _drain(busy)}
    for i, part in parts.items():
        if part.finish == "abort":
            np.testing.assert_array_equal(part.tokens, whole[i].tokens[: len(part.tokens)])
            parts[i] = run(engine(decoder, slots=2), [dataclasses.replace(requests[i], so_far=part)])[i]
    assert {**done, **parts}.keys() == whole.keys() and not done.keys() & parts.keys()
    for i, completion in {**done, **parts}.items():
        np.testing.assert_array_equal(completion.tokens, whole[i].tokens)
        np.testing.assert_allclose(completion.logprobs, whole[i].logprobs, atol=1e-5)
        np.testing.assert_allclose(completion.scores, whole[i].scores, atol=1e-5)
        assert completion.finish == whole[i].finish


def test_a_response_that_came_back_whole_is_not_gone_on_with(decoder):
    whole = run(engine(decoder), [request(i, max_new_tokens=12) for i in range(30)])
    stopped = next(c for c in whole.values() if c.finish == "stop" and len(c.tokens) < 12)
    with pytest.raises(ValueError, match="its response is whole already .stop"):
        engine(decoder).submit(dataclasses.replace(request(stopped.id, max_new_tokens=12), so_far=stopped))


def _drain(engine) -> list:
    done = []
    while engine.pending:
        done += engine.step()
    return done


def test_dispatch_does_not_wait_and_step_collects(decoder):
    requests = [request(i, max_new_tokens=9) for i in range(5)]
    expected = run(engine(decoder, slots=2), requests)
    one = engine(decoder, slots=2)
    one.dispatch()  # nothing to do
    for r in requests:
        one.submit(r)
    done = {}
    while one.pending:
        one.dispatch()
        one.dispatch()  # is under way already
        done |= {c.id: c for c in one.step()}
    for i, completion in expected.items():
        np.testing.assert_array_equal(done[i].tokens, completion.tokens)


def test_a_stop_string_is_found_across_an_interruption(decoder):
    text = lambda tokens: "".join(f"<{t}>" for t in tokens)
    plain = run(engine(decoder), [request(i, max_new_tokens=12) for i in range(30)])
    # One whose tokens number 3 and 4 are a pair that comes there first: the chunk of 4 ends between the two.
    i = next(
        i
        for i, c in plain.items()
        if len(c.tokens) > 5 and text(c.tokens).find(text(c.tokens[3:5])) == len(text(c.tokens[:3]))
    )
    asked = request(i, max_new_tokens=12, stop=(text(plain[i].tokens[3:5]),))
    whole = run(engine(decoder, detokenize=text), [asked])[i]
    first = engine(decoder, chunk=4, detokenize=text)
    first.submit(asked)
    assert first.step() == []
    part = first.abort(i)
    assert len(part.tokens) == 4
    after = run(engine(decoder, detokenize=text), [dataclasses.replace(asked, so_far=part)])[i]
    assert after.finish == whole.finish == "stop" and len(whole.tokens) == 5
    np.testing.assert_array_equal(after.tokens, whole.tokens)


def test_the_cache_grows_as_sequences_do_and_no_further_than_the_capacity(decoder):
    one = engine(decoder, slots=2, chunk=4)
    lengths = []
    for r in [request(0, length=20, max_new_tokens=76), request(1, length=50, max_new_tokens=40)]:
        one.submit(r)
    while one.pending:
        one.step()
        lengths.append(one.cache_length)
    assert lengths[0] == 64 and lengths == sorted(lengths)
    assert lengths[-1] == 128  # the capacity, 96, in units of 64
