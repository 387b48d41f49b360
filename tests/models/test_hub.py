"""Models of the hub, offline: out of a cache folder in the hub's own layout."""

import os
import pathlib
import subprocess
import sys
import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from mars2_jax.errors import ModelError
from mars2_jax.models import hub
from mars2_jax.models.files import find

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def forgetful():
    """The answers of a process are remembered; tests want new ones."""
    hub.snapshot.cache_clear()
    yield
    hub.snapshot.cache_clear()


def cached_model(home: pathlib.Path) -> pathlib.Path:
    """A cache with the model "team/model", whose main branch is COMMIT."""
    repository = home / "hub" / "models--team--model"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def test_a_cached_model_is_found_without_a_connection(tmp_path):
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    folder = cached_model(tmp_path)
    code = f"""
from mars2_jax.errors import ModelError
from mars2_jax.models.files import find, open_checkpoint
print(find("hub:team/model"))
print(find("hub:team/model@{COMMIT}"))
for path in ("hub:team/model", "hub:team/model@other", "hub:team/absent", "hub:not/a/name", "hub:"):
    try:
        with open_checkpoint(path):
            pass
    except ModelError as e:
        print(e)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == [str(folder)] * 2, done.stderr
    assert "gpt2" in lines[2]
    assert "team/model@other" in lines[3] and "not in the local cache" in lines[3]
    assert "team/absent" in lines[4] and "HF_HUB_OFFLINE" in lines[4]
    assert "hub:<owner>/<name>" in lines[5] and "hub:<owner>/<name>" in lines[6]
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "gated: accept its licence .*team/model and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "does not exist on the hub"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.HfHubHTTPError, "could not be downloaded: '?refused'?$"),
    ],
)
def test_what_the_hub_answers_is_one_line(monkeypatch, forgetful, kind, message):
    def refuse(*_, **__):
        raise kind("refused\nwith more lines", response=types.SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=message):
        find("hub:team/model@v1")


def test_only_what_is_needed_is_asked_for_and_once(monkeypatch, forgetful, tmp_path):
    import fnmatch

    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        repository = """config.json generation_config.json model-00001-of-00002.safetensors tokenizer.json
        model.safetensors.index.json tokenizer_config.json chat_template.jinja merges.txt vocab.json LICENSE
        consolidated.safetensors original/params.json pytorch_model.bin onnx/model.onnx README.md tokenizer.model"""
        taken = [f for f in repository.split() if any(fnmatch.fnmatch(f, p) for p in allow_patterns)]
        left = set(repository.split()) - set(taken)
        assert left == {
            "consolidated.safetensors",
            "original/params.json",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "README.md",
            "LICENSE",
        }
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("hub:team/model@v1") == find("hub:team/model@v1") == tmp_path
    assert asked == [("team/model", "v1")]
