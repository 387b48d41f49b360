"""metrics.jsonl and its mirror in TensorBoard."""

import json
import resource

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mars2_jax.errors import DataError, StorageError
from mars2_jax.training.metrics import MetricsWriter, read_metrics


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_one_flushed_line_a_write(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"eval/starter/pass_at_1": 0.25})
        assert len(rows_of(tmp_path)) == 1
        metrics.write(1, {"search/nodes": np.int64(32), "agent/coder/loss": jnp.float32(0.5), "count": 3})
    first, second = rows_of(tmp_path)
    assert list(first) == ["step", "wall", "eval/starter/pass_at_1"]
    assert {name: value for name, value in second.items() if name != "wall"} == {
        "step": 1,
        "search/nodes": 32,
        "agent/coder/loss": 0.5,
        "count": 3,
    }
    assert 0 <= first["wall"] <= second["wall"]


def test_values_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"a": float("nan"), "b": np.float32("inf"), "c": 1.0})
    (row,) = rows_of(tmp_path)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


@pytest.mark.parametrize("values", [{"a": "1"}, {"a": True}, {"a": None}, {"a": np.ones(1) > 0}])
def test_only_numbers(tmp_path, values):
    with MetricsWriter(tmp_path) as metrics, pytest.raises(TypeError, match="a metric is a number"):
        metrics.write(1, values)


def test_reserved_names(tmp_path):
    with MetricsWriter(tmp_path) as metrics, pytest.raises(ValueError, match="taken"):
        metrics.write(1, {"wall": 1.0})


def test_resume_drops_what_will_be_written_again(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in range(4):
            metrics.write(step, {"x": step})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    wall = 1000.0
    lines[2] = json.dumps({"step": 2, "wall": wall, "x": 2})
    # A killed run may leave the beginning of a line.
    path.write_text("\n".join(lines) + '\n{"step": 4, "wa')
    with MetricsWriter(tmp_path, resumed_step=2) as metrics:
        assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
        metrics.write(3, {"x": 33})
    rows = rows_of(tmp_path)
    assert [row["x"] for row in rows] == [0, 1, 2, 33]
    assert wall <= rows[-1]["wall"] < wall + 60
    with MetricsWriter(tmp_path):
        assert rows_of(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": "1", "wall": 0}', "1"])
def test_damage_inside_is_an_error_with_its_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "wall": 0}\n' + line + '\n{"step": 2, "wall": 0}\n')
    with pytest.raises(DataError, match="line 2 is damaged"):
        read_metrics(path)


def events_of(workdir):
    """TFRecords by their public layout: length u64, crc u32, data, crc u32."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            events.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return events


def test_tensorboard_has_the_same_numbers(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"search/nodes": 32, "loss": 0.5})
        metrics.write(2, {"loss": float("nan")})
    values = [(e.step, v.tag, v.simple_value) for e in events_of(tmp_path) for v in e.summary.value]
    assert values[:2] == [(1, "search/nodes", 32.0), (1, "loss", 0.5)]
    assert values[2][:2] == (2, "loss")
    assert np.isnan(values[2][2])
    with MetricsWriter(tmp_path, resumed_step=1):
        pass
    starts = [e.step for e in events_of(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts[-1] == 2


def test_a_full_disk_is_a_users_error(tmp_path):
    """Whichever file meets it first, and in every call from then on: no traceback, and no waiting for a writer that is
    gone."""
    told = pytest.raises(StorageError, match=r"metrics.jsonl cannot be written \(File too large\)")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for names in (1, 30):  # the events are longer than the lines, or shorter
        metrics = MetricsWriter(tmp_path / str(names))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        try:
            with told:
                for step in range(100):
                    metrics.write(step, {f"name/{i}": float(i) for i in range(names)})
            for step in range(100, 200):
                with told:
                    metrics.write(step, {"name/0": 1.0})
            with told:
                metrics.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
