import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from mars2_jax.learning import logprobs
from mars2_jax.learning.logprobs import logprob_and_entropy
from mars2_jax.learning.rows import Rows, make_rows
from mars2_jax.models.config import ModelConfig
from mars2_jax.models.decoder import Decoder
from mars2_jax.models.weights import abstract_decoder
from tests.learning import reference

VOCAB = 31
TINY = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32, tied_embeddings=False
)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logprob_and_entropy_equal_log_softmax(entropy_gradient):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (3, 4, 11)).astype(np.float32)
    target = rng.integers(0, 11, (3, 4))
    lp, entropy = logprob_and_entropy(logits, target, entropy_gradient)
    log_p = reference.log_softmax(logits)
    np.testing.assert_allclose(lp, np.take_along_axis(log_p, target[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)

    weight = rng.normal(size=(2, 3, 4))

    def loss(logits):
        lp, entropy = logprob_and_entropy(logits, target, entropy_gradient)
        return (weight[0] * lp + (weight[1] * entropy if entropy_gradient else 0)).sum()

    with jax.enable_x64(True):
        check_grads(loss, (logits.astype(np.float64),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    if not entropy_gradient:
        assert not np.any(jax.grad(lambda x: logprob_and_entropy(x, target)[1].sum())(logits))


def _host(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def _samples(seed=0, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    sizes = [(5, 3), (1, 9), (12, 1), (7, 7), (2, 4)]
    return [rng.integers(0, vocab, p) for p, _ in sizes], [rng.integers(0, vocab, r) for _, r in sizes]


LAYOUT = [[3, 1, 4], [0, 2]]


@pytest.fixture(scope="module")
def model():
    return Decoder(TINY, nnx.Rngs(0))


@pytest.fixture(scope="module")
def response_logprobs(model):
    """Of the weights and some rows; compiled once for each shape of rows."""
    graphdef = nnx.graphdef(model)
    options = dict(temperature=0.7, entropy_gradient=True)
    return jax.jit(lambda params, rows: logprobs.response_logprobs(nnx.merge(graphdef, params), rows, **options))


def test_a_packed_sample_has_the_numbers_of_a_row_of_its_own(model, response_logprobs):
    prompts, responses = _samples()
    params = nnx.state(model)
    single = response_logprobs(params, make_rows(prompts, responses))
    packed = response_logprobs(params, make_rows(prompts, responses, layout=LAYOUT, packed=64))
    for r, row in enumerate(LAYOUT):
        start = 0
        for i in row:
            end = start + len(responses[i])
            for a, b in zip(packed, single):
                np.testing.assert_allclose(a[r, start:end], b[i, : len(responses[i])], atol=1e-5)
            start = end


def test_a_packed_sample_cannot_see_its_neighbours(model, response_logprobs):
    """Not one bit of its numbers changes with theirs, before or behind it; and its gradient with respect to the
    embeddings of tokens that only they have is zero."""
    prompts, responses = _samples(vocab=20)
    middle, others = 1, [3, 4]  # of the first row
    params = nnx.state(model)
    one = response_logprobs(params, make_rows(prompts, responses, layout=LAYOUT, packed=64))
    for i in others:
        prompts[i], responses[i] = prompts[i] % 5 + 20, responses[i] % 5 + 25
    rows = make_rows(prompts, responses, layout=LAYOUT, packed=64)
    other = response_logprobs(params, rows)
    mine = slice(len(responses[3]), len(responses[3]) + len(responses[middle]))
    for a, b in zip(one, other):
        assert (np.asarray(a)[0, mine] == np.asarray(b)[0, mine]).all()
        assert (np.asarray(a)[0, : mine.start] != np.asarray(b)[0, : mine.start]).any()
    gradient = jax.grad(lambda params: response_logprobs(params, rows)[0][0, mine].sum())(params)
    table = np.asarray(gradient["embedding"][...])
    assert not table[20:].any() and table[:20].any()


SIBLINGS = [[0, 1, 2], [3, 4]]


def _siblings():
    """Samples of which the first three have one prompt, as have the last two."""
    prompts, responses = _samples()
    return [prompts[0]] * 3 + [prompts[2]] * 2, responses


def test_samples_with_a_shared_prompt_have_the_numbers_and_gradients_of_a_row_each(model, response_logprobs):
    prompts, responses = _siblings()
    params = nnx.state(model)
    weights = [np.random.default_rng(i).normal(size=(2, len(r))) for i, r in enumerate(responses)]
    apart = make_rows(prompts, responses)
    together = make_rows(prompts, responses, layout=SIBLINGS, packed=64, share=True)
    # 32 tokens of prompts and responses in place of 60.
    assert (apart.tokens.shape[0], int((together.segment != 0).sum())) == (5, 17 + sum(map(len, responses)))

    def by_sample(layout, arrays):
        parts = {}
        for r, row in enumerate(layout):
            ends = np.cumsum([len(responses[i]) for i in row])
            parts |= {i: [x[r, e - len(responses[i]) : e] for x in arrays] for i, e in zip(row, ends)}
        return [parts[i] for i in range(len(responses))]

    def loss(params, rows, layout):
        parts = by_sample(layout, response_logprobs(params, rows))
        return sum((w * jnp.stack(part)).sum() for w, part in zip(weights, parts))

    alone = [[i] for i in range(5)]
    for a, b in zip(
        by_sample(alone, response_logprobs(params, apart)), by_sample(SIBLINGS, response_logprobs(params, together))
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    one, other = (jax.grad(loss)(params, *how) for how in ((apart, alone), (together, SIBLINGS)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one, other)


def test_siblings_in_a_row_cannot_see_each_other(model, response_logprobs):
    prompts, responses = _siblings()
    params = nnx.state(model)
    make = lambda: make_rows(prompts, responses, layout=SIBLINGS, packed=64, share=True)
    one = response_logprobs(params, make())
    for i in (0, 2):
        responses[i] = (responses[i] + 1) % VOCAB
    other = response_logprobs(params, make())
    mine = slice(len(responses[0]), len(responses[0]) + len(responses[1]))
    for a, b in zip(one, other):
        a, b = np.asarray(a), np.asarray(b)
        assert (a[0, mine] == b[0, mine]).all() and (a[1] == b[1]).all()
        assert (a[0, : mine.start] != b[0, : mine.start]).any()


def test_without_segments_it_would_see_them(model, response_logprobs):
    """The mask of the test before is really there: without it the numbers are others."""
    prompts, responses = _samples()
    rows = make_rows(prompts, responses, layout=LAYOUT, packed=64)
    bare = Rows(rows.tokens, rows.index, rows.mask)
    masked, unmasked = (np.asarray(response_logprobs(nnx.state(model), x)[0])[0] for x in (rows, bare))
    first = len(responses[3])
    np.testing.assert_allclose(masked[:first], unmasked[:first], atol=1e-5)
    assert np.abs(masked - unmasked)[first : first + len(responses[1])].min() > 1e-4


def test_logits_in_pieces_give_the_same_numbers_and_gradients(monkeypatch, model):
    prompts, responses = [np.arange(n) for n in (1, 7, 16)], [np.arange(12)] * 3
    rows = make_rows(prompts, responses, width=12)
    width = rows.mask.shape[1]

    def outputs(params):
        options = dict(temperature=0.7, entropy_gradient=True)
        lp, entropy = logprobs.response_logprobs(nnx.merge(nnx.graphdef(model), params), rows, **options)
        return jnp.where(rows.mask, lp**2 + entropy, 0).sum(), (lp, entropy)

    def run():
        return _host(jax.jit(jax.value_and_grad(outputs, has_aux=True))(nnx.state(model)))

    whole = run()
    # Room for two positions of three rows.
    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 3 * 2 * VOCAB + 1)
    assert logprobs._chunks(3, width, VOCAB) == width // 2
    for a, b in zip(run(), whole):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _arrays(jaxpr):
    """All arrays that a program and those within it compute."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _arrays(inner)


def test_the_logits_of_a_large_vocabulary_never_exist_as_a_whole():
    """4 rows of 1,024 response tokens with Qwen3's vocabulary are 2.5 GB of float32; forward and backward hold no array
    of them above the bound, which is a fifth of that, and the compiled program needs a few such pieces."""
    config = ModelConfig(vocab_size=151_936, embed_dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_dim=8)
    graphdef, params = nnx.split(abstract_decoder(config))
    rows = jax.eval_shape(lambda: make_rows([np.arange(8)] * 4, [np.arange(1024)] * 4))

    def loss(params, rows):
        lp, _ = logprobs.response_logprobs(nnx.merge(graphdef, params), rows, temperature=1.0)
        return jnp.where(rows.mask, lp, 0).sum()

    table = config.vocab_size * config.embed_dim
    gradient = jax.jit(jax.value_and_grad(loss)).trace(params, rows)
    sizes = [x.size for x in _arrays(gradient.jaxpr.jaxpr) if config.vocab_size in x.shape]
    assert max(sizes) <= logprobs._MAX_LOGITS < 4 * 1024 * config.vocab_size / 4
    assert max(sizes) > table, "no logits were found: the test shows nothing"
    assert gradient.lower().compile().memory_analysis().temp_size_in_bytes < 3.5 * 4 * logprobs._MAX_LOGITS
