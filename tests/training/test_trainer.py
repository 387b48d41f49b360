import collections
import errno
import fcntl
import io
import json
import os
import pathlib
import re
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import as_json, default_config
from mars2_jax.errors import ConfigError, DataError, GraderError, ModelError, PromptTooLong
from mars2_jax.grading.grader import Grader
from mars2_jax.grading.verdict import Grade, TestResult, Verdict
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.weights import load
from mars2_jax.tasks.build import build
from mars2_jax.training.agent import Agent
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.evaluation import run_evaluation
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.records import check_graded
from mars2_jax.training.resuming import check_resumable
from mars2_jax.training.searching import StepSearch
from mars2_jax.training.setup import Setup, claim
from mars2_jax.training.trainer import train
from mars2_jax.training.trees import read_trees, trees_path
from mars2_jax.training.writer import EngineWriter
from mars2_jax.validation import validate
from tests.learning import reference
from tests.training.dying import Moment, start, write_config
from tests.training.tiny_team import ANSWERS, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compiles")


def run(config: ConfigDict, workdir) -> str:
    validate(config)
    out = io.StringIO()
    done = train(FrozenConfigDict(config), str(workdir), Console(file=out, width=120))
    assert done == ("stopped on request" not in out.getvalue())
    return out.getvalue()


def final_state(workdir) -> dict[str, np.ndarray]:
    """Everything in the newest checkpoint, by name."""
    with Checkpointer(workdir, read_only=True) as checkpointer:
        saved = checkpointer.restore()
    flat = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(saved.state)}
    return flat | dict(saved.host) | {"step": np.asarray(saved.step)}


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("team")


@pytest.fixture(scope="module")
def finished(folder):
    """A finished run: its config, its workdir, what it printed."""
    config = tiny_config(folder)
    config.grading.time_factor = 20.0
    workdir = folder / "run"
    return config, workdir, run(config, workdir)


def test_a_run_leaves_what_the_design_promises(finished):
    config, workdir, printed = finished
    assert json.loads((workdir / "config.json").read_text())["search"]["nodes"] == 8
    assert any((workdir / "tensorboard").iterdir())
    problems = len(ANSWERS)
    line = f"CPU limits from references: {problems} of {problems} problems, {problems} with one"
    assert [said for said in printed.splitlines() if said.startswith("CPU limits")] == [
        line
    ] * 2  # trained on, judged by
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    for row in rows[1:3]:
        for name in ("search/reward_mean", "search/solve_rate", "search/hidden_pass_rate", "search/nodes"):
            assert row[name] >= 0
        assert {"search/depth_mean", "grading/infra_rate"} <= row.keys()
        assert {"time/search_seconds", "time/grade_seconds", "time/update_seconds"} <= row.keys()
        for agent in config.agents:
            for name in ("nodes", "tokens", "tokens_per_second", "updates"):
                assert f"agent/{agent}/{name}" in row
    assert sum(rows[1][f"agent/{a}/nodes"] for a in config.agents) == rows[1]["search/nodes"] == 24
    for agent in config.agents:
        updated = [row for row in rows[1:3] if f"agent/{agent}/loss" in row]
        assert updated and rows[2][f"agent/{agent}/updates"] >= 1
        for row in updated:
            names = ("loss", "reward_mean", "kl", "entropy", "clip_fraction", "logprob_gap", "grad_norm")
            assert all(np.isfinite(row[f"agent/{agent}/{n}"]) for n in names)
            assert row[f"agent/{agent}/logprob_gap"] < 1e-4
    assert "pass@1_mcts" in printed and "before" in printed and "ann" in printed
    assert rows[0].keys() == rows[3].keys()


def test_shaped_rewards_and_advantages_in_the_file_follow_from_the_rewards(finished):
    config, workdir, _ = finished
    checked = changed = 0
    for step in (1, 2):
        for tree in read_trees(trees_path(workdir, step)):
            nodes = tree["nodes"]
            size = max(n["slot"] for n in nodes) + 1
            reward, parent = np.zeros(size), np.full(size, -1)
            graded = np.zeros(size, bool)
            for n in nodes:
                parent[n["slot"]], graded[n["slot"]] = n["parent"], n["status"] == "GRADED"
                reward[n["slot"]] = n["reward"] or 0.0
            shaped = reference.shaped(reward, parent, graded, config.learning.gamma, config.learning.lam)
            advantage = reference.group_advantages(shaped, graded, np.zeros(size), "std", "mean")
            for n in nodes:
                if n["shaped"] is not None:
                    checked += 1
                    changed += n["shaped"] != n["reward"]
                    assert n["shaped"] == pytest.approx(shaped[n["slot"]], abs=1e-5)
                    assert n["advantage"] == pytest.approx(advantage[n["slot"]], abs=1e-5)
    assert checked > 24 and changed > 0


def test_agents_of_one_checkpoint_learn_apart(folder, tmp_path):
    config = tiny_config(folder)
    config.agents.bob.model.path = config.agents.ann.model.path
    config.training.update(steps=1, evaluate=False)
    run(config, tmp_path)
    state = final_state(tmp_path)
    with open_checkpoint(config.agents.ann.model.path) as checkpoint:
        start = np.asarray(load(checkpoint).blocks[0].mlp.up[...])
    find = lambda name: next(n for n in state if name in n and "params" in n and "blocks" in n and "'up'" in n)
    ann, bob = state[find("ann")], state[find("bob")]
    assert np.abs(ann - start).max() > 1e-4 and np.abs(bob - start).max() > 1e-4
    assert np.abs(ann - bob).max() > 1e-4


def test_every_step_draws_anew(folder, tmp_path):
    """One problem and weights that no update changes: only the keys tell the steps apart."""
    config = tiny_config(folder)
    config.data.update(limit=1, problems_per_step=1)
    config.learning.train_batch_size = 64  # more than there will be
    config.training.update(steps=2, evaluate=False)
    run(config, tmp_path)
    first, second = ([n["response"] for n in read_trees(trees_path(tmp_path, s))[0]["nodes"]] for s in (1, 2))
    assert len(first) == len(second) == 8
    assert first != second


def test_the_same_config_gives_the_same_bits(finished, tmp_path):
    config, workdir, _ = finished
    run(config, tmp_path)
    assert_same_bits(final_state(workdir), final_state(tmp_path))
    for step in (1, 2):
        assert trees_path(workdir, step).read_text() == trees_path(tmp_path, step).read_text()


def killed_and_resumed(config: ConfigDict, folder: pathlib.Path) -> None:
    """Trains to `folder`/run: SIGKILL in the second step, once the first has its checkpoint, then the same command."""
    file, workdir = write_config(config, folder / "config.py"), folder / "run"
    start("mars2_jax.train", file, workdir, Moment("update", steps=1))
    assert "resuming after step 1" in start("mars2_jax.train", file, workdir)


def assert_same_runs(whole: pathlib.Path, pieces: pathlib.Path) -> None:
    """Weights, optimizers, buffers, trees, and all metrics that are no times."""
    assert_same_bits(final_state(whole), final_state(pieces))
    trees = sorted(path.name for path in (whole / "trees").iterdir())
    assert trees == sorted(path.name for path in (pieces / "trees").iterdir())
    for name in trees:
        assert (whole / "trees" / name).read_text() == (pieces / "trees" / name).read_text(), name
    a, b = (read_metrics(folder / "metrics.jsonl") for folder in (whole, pieces))
    timed = lambda name: name == "wall" or "seconds" in name or name.endswith("per_second") or "compilations" in name
    for rows in (a, b):
        rows[:] = [{name: value for name, value in row.items() if not timed(name)} for row in rows]
    assert a == b


def test_killed_and_resumed_gives_the_same_bits(finished, tmp_path):
    """Within the save of the second step. At other moments below, and in `tests.parallel.test_hosts`."""
    config, workdir, _ = finished
    file = write_config(config, tmp_path / "config.py")
    start("mars2_jax.train", file, tmp_path / "run", Moment("saving", steps=1, count=2))
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()
    assert not (tmp_path / "run" / "checkpoints" / "2").exists()
    assert "resuming after step 1" in start("mars2_jax.train", file, tmp_path / "run")
    assert_same_runs(workdir, tmp_path / "run")


MOMENTS = [
    # Each phase in the first step of a life, and in its second; counts are drawn below.
    *[Moment(phase, steps) for phase in ("search", "grading", "update") for steps in (0, 1)],
    *[Moment("saving", 0, count) for count in (0, 1, 2)],
    Moment("saving", 1, 2),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0])
def test_killed_at_ten_random_moments_and_resumed_gives_the_same_bits(folder, tmp_path, seed):
    """SIGKILL ten times, in another order and at other events for each seed, in a run of eight steps."""
    config = tiny_config(folder)
    config.training.update(steps=8, evaluate=False)
    # Nodes wait over a step, so that buffers hold something; the second agent's updates are not the first's.
    config.learning.update(train_batch_size=10, micro_batch_size=5)
    run(config, tmp_path / "whole")
    rng = np.random.default_rng(seed)
    file = write_config(config, tmp_path / "config.py")
    hit = collections.Counter()
    for number in rng.permutation(len(MOMENTS)):
        moment = MOMENTS[number]
        if moment.phase != "saving":
            # A step has 24 nodes, as many programs, more chunks, and an update or two.
            most = {"search": 24, "grading": 24, "update": 1}[moment.phase]
            moment = moment._replace(count=int(rng.integers(most)))
        start("mars2_jax.train", file, tmp_path / "run", moment)
        hit[moment.phase] += 1
    assert min(hit.values()) >= 2 and sum(hit.values()) == 10
    assert "resuming after step" in start("mars2_jax.train", file, tmp_path / "run")
    assert_same_runs(tmp_path / "whole", tmp_path / "run")


def test_sigterm_saves_and_the_same_command_goes_on(finished, tmp_path, monkeypatch):
    """Stopped again and again, in evaluations and in searches of every step; what was written is not written again."""
    config, workdir, _ = finished
    submit, count = Grader.submit, 0
    # Every run first times the references: 5 problems, to train on and to evaluate on.
    calibration = 10

    def submit_and_stop(self, program, problem, **how):
        nonlocal count
        count += 1
        if count == calibration + stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return submit(self, program, problem, **how)

    monkeypatch.setattr(Grader, "submit", submit_and_stop)
    before = signal.getsignal(signal.SIGTERM)
    graded = []
    # The evaluation before takes 2 x 5 answers and 5 trees of 4 nodes, a step 3 trees of 8 nodes.
    for stop_at in (4, 45, 24, 10**9):
        count = 0
        printed = run(config, tmp_path)
        graded.append(count - calibration)
        assert ("stopped on request" in printed) == (stop_at < 10**9), (stop_at, printed)
        assert signal.getsignal(signal.SIGTERM) is before
        assert len(list(tmp_path.glob("pending_search_*"))) <= 1
    assert not list(tmp_path.glob("pending_search_*"))
    # Beside the two evaluations and the two steps: evaluations that were given up, and of each search that was
    # suspended the programs that had no verdict yet, one a tree at most.
    assert sum(graded) <= 30 + 24 + 24 + 30 + 10 + 2 * 3
    for step in (1, 2):
        assert trees_path(workdir, step).read_text() == trees_path(tmp_path, step).read_text()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    # Half a response is read again in one go, which rounds otherwise than token by token.
    straight, stopped = final_state(workdir), final_state(tmp_path)
    assert straight.keys() == stopped.keys()
    for name in straight:
        np.testing.assert_allclose(stopped[name], straight[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_damaged_pending_search_is_passed_over(finished, tmp_path, caplog):
    config, workdir, _ = finished
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    (tmp_path / "run" / "pending_search_000002.npz").write_bytes(b"damaged")
    (tmp_path / "run" / "pending_search_000009.npz").write_bytes(b"of another run")
    run(config, tmp_path / "run")
    assert "searching step 2 anew" in caplog.text
    assert not list((tmp_path / "run").glob("pending_search_*"))
    assert_same_bits(final_state(workdir), final_state(tmp_path / "run"))


def test_the_best_checkpoint_is_kept_and_found(folder, tmp_path):
    config = tiny_config(folder)
    name = f"eval/{pathlib.Path(config.eval.source).stem}/pass@n"
    config.training.update(steps=3, keep=1, keep_best=1, best_metric=name, evaluate_every=1)
    run(config, tmp_path)
    scores = {row["step"]: row[name] for row in read_metrics(tmp_path / "metrics.jsonl") if name in row}
    assert scores.keys() == {0, 1, 2, 3}
    best = max((1, 2, 3), key=lambda step: (scores[step], step))
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {best, 3}
    out = io.StringIO()
    result = run_evaluation(FrozenConfigDict(config), str(tmp_path), Console(file=out, width=120), step="best")
    assert result[name] == pytest.approx(scores[best]) and f"after {best} training steps" in out.getvalue()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:  # by the run's own metric, where none is named
        assert checkpointer.best() == best


def test_a_best_metric_that_is_not_measured_is_named(folder, tmp_path):
    config = tiny_config(folder)
    config.training.update(steps=2, evaluate=False, keep_best=1, best_metric="search/rewards")
    with pytest.raises(
        ConfigError, match="best_metric is 'search/rewards', which step 1 did not .* search/reward_mean"
    ):
        run(config, tmp_path)
    config.training.best_metric = "search/reward_mean"
    assert "resuming after step 1" in run(config, tmp_path)
    # An evaluation's shows in the first one, before any step.
    config.training.update(evaluate=True, evaluate_every=1, best_metric="eval/problems/pass@2")
    with pytest.raises(ConfigError, match="'eval/problems/pass@2', which step 0 did not .* eval/problems/pass@n"):
        run(config, tmp_path / "other")


def test_a_best_metric_may_come_late(folder, tmp_path):
    """Of an agent whose buffer is not full after the first step, or who does not write in every one."""
    config = tiny_config(folder)
    config.learning.train_batch_size = 40
    config.training.update(steps=1, evaluate=False, keep_best=1, best_metric="agent/ann/entropy")
    run(config, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert "agent/ann/entropy" not in row


def test_keys_that_may_change_change(finished, tmp_path, caplog):
    config, workdir, _ = finished
    shutil.copytree(workdir, tmp_path / "run")
    config = config.copy_and_resolve_references()
    config.agents.ann.role = "You are Anna."
    config.training.update(steps=3, evaluate=False, may_change=("agents.ann.role", "rollout"))
    meta = tmp_path / "run"
    printed = run(config, meta)
    assert "config.agents.ann.role was 'You are ann.' and is 'You are Anna.' from here on" in printed
    assert "other code" not in caplog.text
    config.search.nodes = 7
    with pytest.raises(ConfigError, match="config.search.nodes is 7"):
        run(config, meta)
    config.training.may_change = ("no.such.key",)
    with pytest.raises(ConfigError, match="config.no does not exist"):
        validate(config)


def test_other_code_is_warned_of(finished, tmp_path, caplog, monkeypatch):
    config, workdir, _ = finished
    shutil.copytree(workdir, tmp_path / "run")
    monkeypatch.setattr("mars2_jax.__version__", "9.9.9")
    run(config, tmp_path / "run")
    assert "written by other code (mars2_jax '0.1.0' -> '9.9.9')" in caplog.text


def test_another_config_is_refused_and_a_finished_run_shows_its_results(finished):
    config, workdir, _ = finished
    other = config.copy_and_resolve_references()
    other.search.nodes = 7
    with pytest.raises(ConfigError, match=r"config.search.nodes is 7, but the run in this workdir was started with 8"):
        run(other, workdir)
    printed = run(config, workdir)
    assert "resuming after step 2" in printed and "pass@1" in printed
    assert [row["step"] for row in read_metrics(workdir / "metrics.jsonl")] == [0, 1, 2, 2]


def test_a_run_that_is_older_than_a_key_of_its_data_goes_on():
    now = as_json(default_config())
    old = as_json(default_config())
    for key in ("date_from", "date_to", "public_tests"):
        del old["data"][key]
    check_resumable(old, now)
    now["data"]["public_tests"] = 3
    with pytest.raises(ConfigError, match="config.data.public_tests is 3, but the run in this workdir was"):
        check_resumable(old, now)


def test_other_problems_under_the_same_name_are_refused(finished):
    config, workdir, _ = finished
    path = pathlib.Path(config.data.source)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[::-1]))
    try:
        with pytest.raises(ConfigError, match="the problems of config.data are not those that the run in this workdir"):
            run(config, workdir)
    finally:
        path.write_text("".join(lines))


def test_a_set_that_was_built_trains_as_its_file_does(finished, tmp_path):
    config, workdir, _ = finished
    config = config.copy_and_resolve_references()
    build(config.data.source, str(tmp_path / "built"))
    config.data.source = str(tmp_path / "built")
    config.training.update(steps=1, evaluate=False)
    run(config, tmp_path / "run")
    assert trees_path(tmp_path / "run", 1).read_text() == trees_path(workdir, 1).read_text()


@pytest.mark.slow
def test_resuming_replays_everything_that_a_result_hangs_on(folder, tmp_path):
    """Rollout correction lets the last bits of the engine's log-probabilities into the weights; a frozen agent's engine
    is never given new weights; buffers hold nodes over a step; evaluations before and between use the engines too."""

    def config(steps, evaluate):
        config = tiny_config(folder)
        config.learning.update(tis="token", train_batch_size=10, micro_batch_size=5)
        config.agents["cat"] = config.agents.bob.copy_and_resolve_references()
        config.agents.cat.trainable = False
        config.training.update(steps=steps, evaluate=evaluate)
        return config

    run(config(3, True), tmp_path / "straight")
    for steps, evaluate in ((1, False), (2, True), (3, False)):
        run(config(steps, evaluate), tmp_path / "pieces")
    assert_same_bits(final_state(tmp_path / "straight"), final_state(tmp_path / "pieces"))
    for step in (1, 2, 3):
        a, b = (trees_path(tmp_path / name, step).read_text() for name in ("straight", "pieces"))
        assert a == b


def test_scores_of_another_evaluation_are_not_shown_as_this_one(folder, tmp_path):
    config = tiny_config(folder)
    config.training.steps = 1
    run(config, tmp_path)
    config.eval.limit = 2
    printed = run(config, tmp_path)
    assert "2 held-out problems" in printed
    assert printed.split("ann/pass@1")[1].split("│")[1].strip() == "-"


def test_one_run_at_a_time_and_only_where_it_can_write(finished, tmp_path):
    config, workdir, _ = finished
    with claim(str(workdir)), pytest.raises(ConfigError, match="another run is at work"):
        run(config, workdir)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(config, tmp_path / "file" / "run")


def test_a_file_system_without_locks_is_no_other_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"cannot be locked \(Function not implemented\).*mount"),
        claim(str(tmp_path)),
    ):
        pass


def test_a_checkpoint_is_evaluated_with_its_own_agents_only(finished):
    config = finished[0].copy_and_resolve_references()
    config.agents.ann.role = "Someone else."
    with pytest.raises(ConfigError, match=r"config.agents.ann.role differs"):
        run_evaluation(FrozenConfigDict(config), str(finished[1]), Console(file=io.StringIO()))


def test_evaluation_of_models_and_of_a_checkpoint(finished):
    config, workdir, _ = finished
    frozen = FrozenConfigDict(config)
    out = io.StringIO()
    base = run_evaluation(frozen, None, Console(file=out, width=120))
    trained = run_evaluation(frozen, str(workdir), Console(file=out, width=120))
    rows = read_metrics(workdir / "metrics.jsonl")
    for name, value in base.items():
        assert rows[0][name] == pytest.approx(value)
        assert rows[-1][name] == pytest.approx(trained[name])
    assert "after 2 training steps" in out.getvalue()
    with pytest.raises(DataError, match="no checkpoints"):
        run_evaluation(frozen, str(workdir / "trees"), Console(file=out))


def test_problems_without_public_tests_are_evaluated_without_a_search(finished, tmp_path):
    config, _, _ = finished
    lines = [json.loads(line) for line in pathlib.Path(config.eval.source).read_text().splitlines()]
    path = tmp_path / "hidden.jsonl"
    path.write_text("".join(json.dumps(line | {"public": []}) + "\n" for line in lines))
    config = config.copy_and_resolve_references()
    config.eval.source = str(path)
    out = io.StringIO()
    scores = run_evaluation(FrozenConfigDict(config), None, Console(file=out, width=120))
    assert len(scores) == 2 and all(name.endswith("pass@1") for name in scores)
    assert "no Pass@1(MCTS)" in out.getvalue()


def test_a_run_that_has_made_more_steps_is_left_alone(finished):
    config, workdir, _ = finished
    before = (pathlib.Path(workdir) / "config.json").read_text()
    config = config.copy_and_resolve_references()
    config.training.steps = 1
    with pytest.raises(ConfigError, match="config.training.steps is 1, but the run in .* has made 2: raise it"):
        train(FrozenConfigDict(config), str(workdir), Console(file=io.StringIO()))
    assert (pathlib.Path(workdir) / "config.json").read_text() == before


def test_a_grader_that_fails_on_every_program_ends_the_run():
    def explored(*verdicts):
        grades = [Grade(v, (TestResult(v, error="the sandbox died"),), ()) for v in verdicts]
        return SimpleNamespace(attempts=[{1: SimpleNamespace(grade=grade)} for grade in grades])

    check_graded(explored(Verdict.INFRA, Verdict.WRONG))
    with pytest.raises(GraderError, match="failed on all 2 programs of this step .the sandbox died."):
        check_graded(explored(Verdict.INFRA, Verdict.INFRA))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.agents.ann.model.update(path="/nowhere"), ModelError, "'/nowhere' not found"),
        (lambda c: c.agents.ann.model.update(sha256="0" * 64), ModelError, "is a folder"),
        (lambda c: c.rollout.update(max_prompt_tokens=20), PromptTooLong, "config.rollout.max_prompt_tokens=20"),
        (lambda c: c.rollout.update(max_prompt_tokens=5000), ConfigError, "was made for 4096"),
        (lambda c: c.data.update(source="/nowhere.jsonl"), DataError, "/nowhere.jsonl"),
        (lambda c: c.mesh.update(data=3, fsdp=1), ConfigError, "config.mesh"),
        (
            lambda c: c.agents.bob.model.update(attention="splash"),
            ConfigError,
            "agents.bob.model.attention .* TPUs only",
        ),
        (lambda c: c.rollout.update(temperature=0.0), ConfigError, "config.rollout.temperature is 0"),
        (lambda c: c.rollout.update(temperature=1e-37), ConfigError, "temperature is 1e-37; .* at least 0.001"),
        (lambda c: c.rollout.update(top_p=0.9), ConfigError, "must be off"),
        (lambda c: c.eval.update(max_prompt_tokens=20), PromptTooLong, "config.eval.max_prompt_tokens=20"),
        (
            lambda c: c.agents.bob.update(enable_thinking="off"),
            ConfigError,
            "config.agents.bob.enable_thinking is 'off'",
        ),
        (lambda c: [a.update(trainable=False) for a in c.agents.values()], ConfigError, "no agent is trainable"),
    ],
)
def test_mistakes_are_named_before_any_work(finished, tmp_path, change, error, message):
    config = finished[0].copy_and_resolve_references()
    change(config)
    with pytest.raises(error, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_agents_that_only_play_may_be_greedy(folder):
    config = tiny_config(folder)
    config.rollout.temperature = 0.0
    frozen = FrozenConfigDict(config)
    assert len(Setup.check(frozen, learn=False).team(learn=False)) == 2
    with pytest.raises(ConfigError, match="must be above 0 to train"):
        Setup.check(frozen).team()


def test_a_frozen_agent_plays_and_does_not_learn(folder, tmp_path):
    config = tiny_config(folder)
    config.agents.bob.trainable = False
    config.training.steps = 1
    config.training.evaluate = False
    run(config, tmp_path)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert row["agent/bob/nodes"] > 0 and "agent/bob/updates" not in row
    assert row["agent/ann/updates"] >= 1
    assert not any("bob" in name for name in final_state(tmp_path))


def test_an_agent_waits_until_its_buffer_is_full(folder, tmp_path):
    config = tiny_config(folder)
    config.learning.train_batch_size = 40
    config.training.evaluate = False
    run(config, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    written = [sum(row[f"agent/{a}/nodes"] for row in rows) for a in ("ann", "bob")]
    for agent, nodes in zip(("ann", "bob"), written, strict=True):
        assert rows[-1][f"agent/{agent}/updates"] == nodes // 40
        assert rows[-1][f"agent/{agent}/buffer"] == nodes % 40
    assert all(n["shaped"] is None for t in read_trees(trees_path(tmp_path, 1)) for n in t["nodes"])
    state = final_state(tmp_path)
    assert len(state["ann/slot"]) == written[0] % 40


@pytest.mark.slow
def test_other_ways_to_learn_resume_with_the_same_bits(folder, tmp_path):
    """Other optimizers with schedules, packed rows, the KL in the reward, and trees of one problem that wait together:
    two problems for three trees a step."""

    def config(steps):
        config = tiny_config(folder)
        config.data.limit = 2
        config.learning.update(estimator="tree_grpo", objective="cispo", kl="k1", kl_in="reward", kl_coef=0.1)
        config.learning.update(train_batch_size=6, pack_tokens=1024)
        decay = dict(schedule="cosine", decay_updates=3, final_learning_rate=1e-4, weight_decay=0.01)
        config.agents.ann.optimizer.update(name="muon", **decay)
        config.agents.bob.optimizer.update(name="adafactor", **decay)
        config.training.update(steps=steps, evaluate=False)
        return config

    run(config(2), tmp_path / "straight")
    for steps in (1, 2):
        run(config(steps), tmp_path / "pieces")
    state = final_state(tmp_path / "straight")
    assert_same_bits(state, final_state(tmp_path / "pieces"))
    a, b = (trees_path(tmp_path / name, 2).read_text() for name in ("straight", "pieces"))
    assert a == b
    # Of nodes that an agent wrote after its first update, the KL to the reference is not 0, and in their reward.
    kept = np.concatenate([state[f"{agent}/kl"] for agent in config(2).agents])
    nodes = [n for t in read_trees(trees_path(tmp_path / "straight", 2)) for n in t["nodes"] if n["shaped"] is not None]
    assert np.any(kept) or any(n["shaped"] != n["reward"] for n in nodes)


def test_what_waits_in_a_buffer_fits_the_config_that_goes_on(folder, tmp_path):
    """Nodes that were kept without what the loss now asks for, too long for it now, or in larger trees."""
    config = tiny_config(folder)
    config.learning.update(train_batch_size=10, micro_batch_size=5, kl_coef=0.0)
    config.training.update(steps=1, evaluate=False)
    run(config, tmp_path)
    waiting = len(final_state(tmp_path)["ann/slot"]) + len(final_state(tmp_path)["bob/slot"])
    assert waiting
    config.learning.update(kl_coef=0.1, kl_in="reward")
    config.training.update(steps=2, may_change=("learning", "search.nodes", "rollout"))
    printed = run(config, tmp_path)
    assert sum(int(n) for n in re.findall(r"(\d+) nodes that wait for", printed)) == waiting
    config.learning.update(kl_in="loss")
    config.search.nodes = 4
    config.training.steps = 3
    assert "nodes that wait" not in run(config, tmp_path)
    config.rollout.max_prompt_tokens = 250
    config.training.steps = 4
    run(config, tmp_path)


def test_engines_get_new_weights_once_a_step(folder, tmp_path, monkeypatch):
    """However many updates it has; they are cast, quantized and moved for it."""
    config = tiny_config(folder)
    config.training.update(steps=2, evaluate=False)
    handed, hand_over = [], Agent.hand_over
    monkeypatch.setattr(Agent, "hand_over", lambda agent: (handed.append(agent.name), hand_over(agent)))
    run(config, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for name in ("ann", "bob"):
        assert rows[-1][f"agent/{name}/updates"] > 2
        # With the first weights, and after each step.
        assert handed.count(name) == 3


def test_a_damaged_file_of_trees_does_not_fail_a_finished_run(finished, tmp_path, caplog):
    config, workdir, _ = finished
    shutil.copytree(workdir, tmp_path / "run")
    trees_path(tmp_path / "run", 1).write_text("half a")
    assert "step 2, problem" in run(config, tmp_path / "run")
    assert "showing no tree of step 1" in caplog.text


def test_the_rate_of_decoding_is_of_what_was_decoded(finished, tmp_path, monkeypatch):
    """Not of what a suspended search had before: here all of ann's nodes, and nearly all of bob's."""
    config, workdir, _ = finished
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    stepped, step = [], EngineWriter.step

    def step_and_stop(writer):
        drafts = step(writer)
        stepped.append((writer.name, writer.seconds, sum(d.tokens for d in drafts)))
        return drafts

    wait, count = Grader.wait, 0

    def wait_and_stop(self, ticket):
        nonlocal count
        count += 1
        if count == 10 + stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(self, ticket)

    monkeypatch.setattr(Grader, "wait", wait_and_stop)
    stop_at = 20
    assert "stopped on request" in run(config, tmp_path / "run")
    stop_at, count = 10**9, 0
    monkeypatch.setattr(EngineWriter, "step", step_and_stop)
    config = config.copy_and_resolve_references()
    config.training.evaluate = False
    run(config, tmp_path / "run")
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    for name in ("ann", "bob"):
        tokens = sum(t for n, _, t in stepped if n == name)
        rate = row.get(f"agent/{name}/tokens_per_second")
        assert (rate is None) == (tokens == 0)
        assert row[f"agent/{name}/tokens"] > tokens
        if rate is not None:
            # What of a response was there before is not counted either.
            seconds = max(s for n, s, _ in stepped if n == name)
            assert rate <= tokens / seconds * (1 + 1e-6)


def test_the_rate_of_several_processes_is_of_all_over_the_longest():
    spent = np.asarray([[[0.0, 0], [2.0, 10]], [[4.0, 30], [1.0, 50]]])
    found = StepSearch(None, {}, [], {}, 1, spent)
    assert found.tokens_per_second({0}) == 30 / 4.0
    assert found.tokens_per_second({0, 1}) == 90 / 5.0
    assert StepSearch(None, {}, [], {}, 1, 0 * spent).tokens_per_second({1}) is None
