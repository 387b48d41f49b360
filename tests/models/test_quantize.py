"""Eight-bit weights against NumPy, and an engine that decodes with them against a forward pass in float."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars2_jax.models.lora import Lora
from mars2_jax.models.quantize import quantize, quantize_weight, quantized_decoder
from mars2_jax.models.weights import abstract_decoder
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from tests.models.tiny import TINY, logits, random_decoder

LORA = Lora(rank=2, alpha=4.0, targets=frozenset({"attention", "mlp"}))
INPUTS = {"qkv": 1, "out": 3, "gate": 1, "up": 1, "down": 1}


@pytest.mark.parametrize(("shape", "inputs"), [((6, 40), 1), ((8, 2, 3, 5), 3), ((2, 4, 3, 16), 1)])
def test_codes_and_scales_equal_those_of_numpy(shape, inputs):
    rng = np.random.default_rng(0)
    weight = rng.standard_t(3, size=shape).astype(np.float32)  # heavy tails
    weight[1] = 0
    codes, scale = (np.asarray(x) for x in quantize_weight(jnp.asarray(weight), inputs))
    assert codes.dtype == np.int8 and scale.dtype == np.float32
    flat = weight.reshape(-1, int(np.prod(shape[-inputs:])))
    largest = np.abs(flat).max(1)
    want = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    np.testing.assert_allclose(scale.ravel(), want, rtol=1e-6)
    rows = codes.reshape(flat.shape).astype(np.float32)
    assert np.abs(rows).max() == 127
    # Half a step, and the rounding of the division.
    assert (np.abs(rows * scale.reshape(-1, 1) - flat) <= scale.reshape(-1, 1) * (0.5 + 1e-4)).all()
    np.testing.assert_array_equal(codes[1], 0)


def dequantized(params: nnx.State) -> nnx.State:
    """The weights that the codes stand for, as a state of the plain decoder."""
    flat = dict(nnx.to_flat_state(params))
    plain = []
    for path, variable in flat.items():
        if (*path[:-1], path[-1].removesuffix("_scale")) in flat and path[-1].endswith("_scale"):
            continue
        if path[-1] in INPUTS:
            scale = np.asarray(flat[*path[:-1], f"{path[-1]}_scale"][...])
            shape = scale.shape + (1,) * INPUTS[path[-1]]
            variable = variable.replace(jnp.asarray(np.asarray(variable[...], np.float32) * scale.reshape(shape)))
        plain.append((path, variable))
    return nnx.from_flat_state(plain)


def test_an_engine_scores_as_a_forward_pass_with_the_rounded_weights():
    """With adapters on them, which stay in float."""
    graphdef, params = random_decoder(TINY, LORA)
    small = quantize(params)
    int8 = quantized_decoder(abstract_decoder(TINY, lora=LORA))
    assert jax.tree.structure(nnx.state(int8)) == jax.tree.structure(small)
    engine = Engine(nnx.merge(nnx.graphdef(int8), small), slots=2, chunk=8, capacity=64, stop_ids=())
    prompt = np.arange(2, 12, dtype=np.int32)
    engine.submit(Request(0, prompt, np.asarray([1, 2], np.uint32), SamplingParams(max_new_tokens=16)))
    done = []
    while engine.pending:
        done += engine.step()
    sequence = np.concatenate([prompt, done[0].tokens])

    def forward(params):
        rows = jax.nn.log_softmax(logits(nnx.merge(graphdef, params), sequence))[len(prompt) - 1 : -1]
        return np.asarray(rows)[np.arange(16), done[0].tokens]

    np.testing.assert_allclose(done[0].scores, forward(dequantized(small)), atol=1e-4)
    # And the rounding is really there.
    assert np.abs(done[0].scores - forward(params)).max() > 1e-3


def test_what_is_rounded_takes_a_quarter_of_the_memory():
    _, params = random_decoder(TINY, LORA)
    small = dict(nnx.to_flat_state(quantize(params)))
    for path, variable in nnx.to_flat_state(params):
        if path[-1] in INPUTS:
            codes, scale = small[path][...], small[*path[:-1], f"{path[-1]}_scale"][...]
            assert codes.nbytes == variable[...].nbytes / 4
            assert scale.nbytes == codes.nbytes / np.prod(codes.shape[-INPUTS[path[-1]] :]) * 4
        else:
            assert small[path][...] is variable[...]


def test_codes_and_scales_lie_where_the_weight_does():
    state = nnx.state(quantized_decoder(abstract_decoder(TINY, lora=LORA)))
    attention = state["blocks"][0]["attention"]
    assert attention["qkv"].get_metadata("axes") == ("kv_heads", None, None, "embed")
    assert attention["qkv_scale"].get_metadata("axes") == ("kv_heads", None, None)
    assert attention["out_scale"].get_metadata("axes") == ("embed",)
    assert attention["qkv_lora"]["a"].dtype == jnp.float32
