import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from mars2_jax.models.lora import Adapter, Lora, learned, merge_lora
from mars2_jax.models.weights import abstract_decoder
from mars2_jax.parallel.mesh import param_shardings
from tests.models.tiny import TINY, random_decoder

BOTH = Lora(3, 12.0, frozenset({"attention", "mlp"}))
SMALL = dataclasses.replace(TINY, layers=1)
BIASED = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True, tied_embeddings=False)
TOKENS = np.arange(10)[None] * 7 % TINY.vocab_size


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, params):
    model = nnx.merge(graphdef, params)
    return model.logits(model(jnp.asarray(TOKENS)))


@pytest.mark.parametrize("targets", [{"attention"}, {"mlp"}, {"attention", "mlp"}], ids=lambda x: "+".join(sorted(x)))
def test_targets_name_the_weights_with_adapters(targets):
    params = nnx.state(abstract_decoder(TINY, lora=Lora(3, 12.0, frozenset(targets))), nnx.LoRAParam)
    expected = {"attention": {"qkv_lora", "out_lora"}, "mlp": {"gate_lora", "up_lora", "down_lora"}}
    assert {p[-2] for p, _ in nnx.to_flat_state(params)} == set().union(*(expected[target] for target in targets))


def test_untrained_adapters_change_nothing():
    np.testing.assert_array_equal(
        logits(*random_decoder(SMALL, BOTH, trained=False)), logits(*random_decoder(SMALL, None))
    )


def test_a_starts_uniform_within_one_over_the_root_of_its_inputs_and_b_at_zero():
    weight = nnx.Param(jnp.zeros((6, 50, 20)), axes=(None, "embed", None))
    one, two = (Adapter(weight, 2, BOTH, nnx.Rngs(lora=seed)) for seed in (0, 1))
    assert one.a.shape == (3, 50, 20) and one.b.shape == (6, 3) and not one.b[...].any()
    bound = 1000**-0.5
    assert 0.9 * bound < np.abs(one.a[...]).max() <= bound
    assert np.std(one.a[...]) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert (one.a[...] != two.a[...]).all()


@pytest.mark.parametrize("config", [SMALL, BIASED], ids=["llama", "biased"])
def test_merged_weights_compute_the_same(config):
    graphdef, params = random_decoder(config, BOTH)
    plain, start = random_decoder(config, None)
    merged = merge_lora(params, BOTH)
    assert jax.tree.structure(merged) == jax.tree.structure(start)
    want = logits(graphdef, params)
    assert np.abs(want - logits(plain, start)).max() > 0.1
    np.testing.assert_allclose(logits(plain, merged), want, atol=1e-5)


def test_the_product_counts_alpha_over_rank_times():
    weight = nnx.Param(jnp.zeros((6, 5)), axes=(None, None))
    adapter = Adapter(weight, 1, Lora(2, 8.0, frozenset()), nnx.Rngs(lora=0))
    adapter.b[...] = jnp.ones((6, 2))
    np.testing.assert_allclose(adapter(jnp.ones((3, 5)))[1, 4], 4.0 * np.asarray(adapter.a[...]).sum(), rtol=1e-5)


def test_adapters_lie_beside_their_weights():
    mesh = AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    placed = param_shardings(mesh, nnx.state(abstract_decoder(TINY, lora=BOTH)))
    # For each dimension its mesh axis; a specification may leave out dimensions at the end that are not split.
    spec = {
        path[-2:]: (*s.get_value().spec, None, None, None)[: 4 if "attention" in path else 2]
        for path, s in nnx.to_flat_state(placed)
    }
    assert spec["qkv_lora", "a"][:2] == (None, "fsdp")
    assert spec["qkv_lora", "b"] == ("tensor", None, None, None)
    assert spec["out_lora", "a"] == (None, "tensor", None, None)
    assert spec["out_lora", "b"][:2] == ("fsdp", None)
    for name in ("gate_lora", "up_lora"):
        assert (spec[name, "a"], spec[name, "b"]) == ((None, "fsdp"), ("tensor", None))
    assert (spec["down_lora", "a"], spec["down_lora", "b"]) == ((None, "tensor"), ("fsdp", None))


def test_layers_have_one_structure():
    """So that a scan can run over their stacked weights."""
    model = abstract_decoder(TINY, lora=BOTH)
    assert len({nnx.graphdef(block) for block in model.blocks}) == 1
    first, second = (nnx.state(block) for block in model.blocks)
    assert jax.tree.structure(first) == jax.tree.structure(second)


def test_only_adapters_are_learned_where_there_are_any():
    params = nnx.to_flat_state(nnx.state(abstract_decoder(TINY, lora=BOTH), learned(BOTH)))
    assert len(params) == 10 * TINY.layers and all(isinstance(x, nnx.LoRAParam) for _, x in params)
    plain = abstract_decoder(TINY)
    assert jax.tree.structure(nnx.state(plain, learned(None))) == jax.tree.structure(nnx.state(plain))
