"""Rounds of a search that was stopped: found again in order, as far as they are whole."""

from __future__ import annotations

import pytest

from mars2_jax.errors import DataError
from mars2_jax.training import pending
from mars2_jax.training.pending import PendingSearch


@pytest.fixture
def texts(monkeypatch):
    """Searches that are strings; "damaged" cannot be read."""

    def read(path):
        if path.read_text() == "damaged":
            raise DataError("damaged")
        return path.read_text()

    monkeypatch.setattr(pending, "write_search", lambda path, text: path.write_text(text))
    monkeypatch.setattr(pending, "read_search", read)


def test_rounds_up_to_the_first_that_is_damaged(texts, tmp_path, caplog):
    kept = PendingSearch(tmp_path)
    kept.keep(2, ["one"])
    kept.keep(7, ["first", "second", "third"])
    assert kept.of(1) == [] and kept.of(2) == ["one"] and kept.of(7) == ["first", "second", "third"]
    assert not caplog.messages
    kept.path(7, 2).write_text("damaged")
    assert kept.of(7) == ["first"]
    assert "searching step 7 from round 2 anew: damaged" in caplog.text
    # The third round followed from another second one than what comes now.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pending_search_000002.npz",
        "pending_search_000007.npz",
    ]
    kept.path(7).write_text("damaged")
    assert kept.of(7) == [] and "searching step 7 anew: damaged" in caplog.text
    kept.forget(lambda step: step <= 2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_touched(texts, tmp_path):
    others = ["pending_search_3.txt", "pending_search_000003_round_x.npz", "pending_search_000003.npz.bak"]
    for name in others:
        (tmp_path / name).write_text("")
    kept = PendingSearch(tmp_path)
    kept.keep(3, ["one", "two"])
    (tmp_path / "pending_search_000003_round_3.npz.tmp").write_text("half")
    kept.forget(lambda step: step == 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
