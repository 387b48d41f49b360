import json

import pytest
import transformers

from mars2_jax.errors import ModelError
from mars2_jax.models.config import ModelConfig
from mars2_jax.planning.models import model_shape


def test_shapes_that_are_known_without_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, parameters in [
        # The numbers of parameters that the models' cards give.
        ("Qwen/Qwen3-8B", 8.2e9),
        ("Qwen/Qwen3-14B", 14.8e9),
        ("inclusionAI/AReaL-boba-2-8B", 8.2e9),
        ("inclusionAI/AReaL-boba-2-14B", 14.8e9),
        ("agentica-org/DeepCoder-14B-Preview", 14.8e9),
    ]:
        shape, source = model_shape(f"hub:{name}")
        assert shape.parameters == pytest.approx(parameters, rel=0.01), name
        assert "table" in source
        # The paper's longest prompt and response.
        assert shape.max_length >= 4096 + 32_768


def test_a_folder_needs_only_its_config(tmp_path):
    transformers.Qwen3Config(num_hidden_layers=3, vocab_size=77).save_pretrained(tmp_path)
    shape, source = model_shape(str(tmp_path))
    assert (shape, source) == (ModelConfig.from_hf(tmp_path), str(tmp_path / "config.json"))
    assert (shape.layers, shape.vocab_size) == (3, 77)


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"hub:some/model.*give a folder"):
        model_shape("hub:some/model")
    with pytest.raises(ModelError, match=r"hub:some/odd/model.*give a folder"):
        model_shape("hub:some/odd/model")
    with pytest.raises(ModelError, match="not found"):
        model_shape(str(tmp_path / "nothing"))
    (tmp_path / "file.bin").write_text("")
    with pytest.raises(ModelError, match="neither"):
        model_shape(str(tmp_path / "file.bin"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="gpt2"):
        model_shape(str(tmp_path))
