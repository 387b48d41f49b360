"""The watch of a process over the others, on a board in memory."""

from __future__ import annotations

import threading
import time
import types

import pytest

from mars2_jax.parallel.watch import LOST, Watch


class Gone(Exception):
    pass


class Memory:
    """A board; `gone` is whether process 0 keeps it no more."""

    def __init__(self):
        self.notes, self.gone, self.lock = {}, False, threading.Lock()

    def post(self, name, note):
        if self.gone:
            raise Gone
        with self.lock:
            self.notes[name] = note

    def read(self):
        if self.gone:
            raise Gone
        with self.lock:
            return dict(self.notes)


class Process:
    """A process of a run, as far as the watch sees it."""

    def __init__(self, board, index, count=2):
        self.codes, self.request = [], types.SimpleNamespace(requested=False)
        self.watch = Watch(
            board, index, count, self.request, errors=(Gone,), period=0.01, patience=0.4, end=self.codes.append
        )
        self.watch.start()


@pytest.fixture
def board():
    return Memory()


@pytest.fixture
def pair(board):
    processes = [Process(board, 0), Process(board, 1)]
    yield processes
    for process in processes:
        process.watch.close()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_live_are_left_alone(pair):
    time.sleep(0.6)
    assert not any(process.codes or process.request.requested for process in pair)


def test_the_wish_to_stop_is_shared(pair):
    pair[1].request.requested = True
    until(lambda: pair[0].request.requested)
    assert not pair[0].codes


def test_a_process_that_gives_no_sign_of_life_ends_the_others(pair, capsys):
    pair[1].watch.close()
    until(lambda: pair[0].codes)
    assert pair[0].codes == [LOST]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: process 1 gave no sign of life for")


def test_one_that_never_gave_any_ends_them_too(board, capsys):
    process = Process(board, 0, count=3)
    until(lambda: process.codes)
    assert process.codes == [LOST] and "no sign of life" in capsys.readouterr().err


def test_without_process_0_the_others_end(pair, board, capsys):
    pair[0].watch.close()
    board.gone = True
    until(lambda: pair[1].codes)
    assert pair[1].codes == [LOST] and "process 0 cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [0, 1])
def test_what_failed_in_one_is_told_by_the_others_with_its_code(pair, failing, capsys):
    pair[failing].watch.fail("config.data.source: no such file", 2)
    until(lambda: pair[1 - failing].codes)
    assert pair[1 - failing].codes == [2] and not pair[failing].codes
    assert capsys.readouterr().err == f"error: process {failing} failed: config.data.source: no such file\n"
    pair[failing].watch.fail("again", 1)  # the others are gone: nothing happens


def test_a_failure_is_no_second_one_where_process_0_is_gone(pair, board):
    board.gone = True
    pair[1].watch.fail("collective failed", 1)
    assert not pair[1].codes
