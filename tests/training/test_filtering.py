"""Dynamic filtering: what is left out is what an independent transcription gives no advantage, and costs nothing; a run
that is stopped or killed in any round ends as one that was not."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from mars2_jax.errors import ConfigError
from mars2_jax.grading.grader import Grader
from mars2_jax.learning.batch import TreeArrays
from mars2_jax.learning.update import Learner
from mars2_jax.tasks.curriculum import Curriculum, PassRates, next_problems
from mars2_jax.training.filtering import telling_nodes
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.trees import read_trees, trees_path
from mars2_jax.validation import validate
from tests.learning import reference
from tests.learning.forests import forests, learning
from tests.training.dying import ROOT
from tests.training.test_trainer import assert_same_bits, final_state, run
from tests.training.tiny_team import ANSWERS, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compiles")

ESTIMATORS = ["mars2", "grpo", "rloo", "treerl", "treepo", "tree_grpo", "sibling"]


def as_trees(forest, problem, length=None) -> dict[tuple[int, int], TreeArrays]:
    reward, parent, agent, graded = forest
    length = np.zeros(parent.shape, np.int32) if length is None else length
    return {
        (3, t): TreeArrays(np.nan_to_num(reward[t]), parent[t], agent[t], graded[t], length[t], problem[t])
        for t in range(len(parent))
    }


@settings(deadline=None)
@given(
    forest=forests,
    how=st.sampled_from([(e, "tree") for e in ESTIMATORS] + [(e, "tree_agent") for e in ("mars2", "grpo", "rloo")]),
    problem=st.sampled_from([[0, 1, 2], [0, 0, 1], [0, 1, 0]]),
)
def test_what_is_left_out_has_no_advantage_in_a_transcription(forest, how, problem):
    """Agents 0 and 1 learn, together; 2 is another learner; agent 3, who wrote nothing, is a third."""
    estimator, group = how
    reward, parent, agent, graded = forest
    _, advantage = reference.tree_advantages(
        np.where(graded, reward, 0), parent, agent, graded, problem, estimator, group
    )
    voices = {"two": (0, 1), "one": (2,), "mute": (3,)}
    written = {
        name: [((3, t), int(s), None) for t in range(3) for s in np.flatnonzero(graded[t] & np.isin(agent[t], numbers))]
        for name, numbers in voices.items()
    }
    options = {"estimator": estimator} | ({"group": group} if group != "tree" else {})
    telling = telling_nodes(written, as_trees(forest, problem), learning(**options), 8)
    assert telling["mute"] == []
    for name, nodes in written.items():
        for t in range(3):
            mine = [abs(advantage[t][slot]) for (_, tree), slot, _ in nodes if tree == t]
            left = [node for node in telling[name] if node[0] == (3, t)]
            if mine and max(mine) > 1e-5:
                assert left == [node for node in nodes if node[0] == (3, t)]
            elif not any(mine):
                # Zero, and not by chance: float32 may round what cancels out.
                others = [r for u in range(3) if problem[u] == problem[t] for r in reward[u][graded[u]]]
                same = others if estimator == "tree_grpo" else reward[t][graded[t]].tolist()
                if not mine or len(set(same)) == 1:
                    assert left == []


def test_a_penalty_on_length_tells_trees_apart_that_the_grader_does_not():
    parent = np.asarray([[-1, 0, 0], [-1, 0, 0]], np.int32)
    forest = np.zeros((2, 3), np.float32), parent, np.maximum(parent, -1), parent >= 0
    trees = as_trees(forest, [0, 1], length=np.asarray([[0, 3, 4], [0, 3, 8]], np.int32))
    nodes = {"ann": [((3, t), slot, None) for t in range(2) for slot in (1, 2)]}
    assert telling_nodes(nodes, trees, learning(), 8) == {"ann": []}
    penalized = telling_nodes(nodes, trees, learning(overlong_buffer=4, overlong_factor=1.0), 8)
    assert penalized == {"ann": [((3, 1), 1, None), ((3, 1), 2, None)]}


def test_responses_that_are_masked_keep_no_tree():
    """Slot 1 of either tree passes, alone. All responses of tree 1 were cut off by the budget."""
    parent = np.asarray([[-1, 0, 0], [-1, 0, 0]], np.int32)
    reward = np.asarray([[0, 1, 0], [0, 1, 0]], np.float32)
    trees = as_trees((reward, parent, np.maximum(parent, -1), parent >= 0), [0, 1])
    ended, cut = types.SimpleNamespace(finish="stop"), types.SimpleNamespace(finish="length")
    nodes = [((3, 0), 1, ended), ((3, 0), 2, cut), ((3, 1), 1, cut), ((3, 1), 2, cut)]
    assert telling_nodes({"ann": nodes}, trees, learning(), 8) == {"ann": nodes}
    assert telling_nodes({"ann": nodes}, trees, learning(overlong_mask=True), 8) == {"ann": nodes[:2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_resamples=2), "config.data.max_resamples is 2, but dynamic_filtering is False"),
        (dict(curriculum_floor=0.5), "config.data.curriculum_floor is 0.5, but curriculum is 'none'"),
        (dict(curriculum="pass_rate", curriculum_low=0.95), "curriculum_low is 0.95, above .*_high, which is 0.9"),
        (dict(curriculum="pass_rate", curriculum_floor=1e-9), "curriculum_floor is 1e-09; it must be at least 0.0001"),
        (dict(curriculum="pass_rate", curriculum_floor=0.0), "curriculum_floor is 0.0; it must be at least 0.0001"),
        (dict(curriculum="hard"), "config.data.curriculum is 'hard'; it may be none, pass_rate"),
        (dict(dynamic_filtering=True), "dynamic_filtering is True, but with the KL in the reward .* use kl_in='loss'"),
    ],
)
def test_options_that_nothing_would_read_are_refused(tmp_path_factory, changes, message):
    config = tiny_config(tmp_path_factory.mktemp("refused"))
    config.data.update(changes)
    if changes == dict(dynamic_filtering=True):
        validate(config)
        config.learning.kl_in = "reward"
    with pytest.raises(ConfigError, match=message):
        validate(config)


def filtered_config(folder: pathlib.Path) -> ConfigDict:
    config = tiny_config(folder)
    config.data.update(dynamic_filtering=True, max_resamples=2, curriculum="pass_rate", curriculum_floor=0.3)
    config.training.update(steps=3, evaluate=False, keep=3)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("team")


@pytest.fixture(scope="module")
def finished(folder):
    """A finished run: its config, its workdir, and how many responses each step scored."""
    config, workdir, scored = filtered_config(folder), folder / "run", []
    score = Learner.score_responses

    def counted(self, params, prompts, *args, **kwargs):
        scored.append(len(prompts))
        return score(self, params, prompts, *args, **kwargs)

    Learner.score_responses = counted
    try:
        run(config, workdir)
    finally:
        Learner.score_responses = score
    return config, workdir, scored


def advantages(tree, config) -> dict[str, list[float]]:
    """Of a tree in the file: by agent, by a transcription."""
    nodes = [n for n in tree["nodes"] if n["status"] == "GRADED"]
    size = max(n["slot"] for n in nodes) + 1
    reward, parent, graded = np.zeros(size), np.full(size, -1), np.zeros(size, bool)
    for n in nodes:
        reward[n["slot"]], parent[n["slot"]], graded[n["slot"]] = n["reward"], n["parent"], True
    shaped = reference.shaped(reward, parent, graded, config.learning.gamma, config.learning.lam)
    advantage = reference.group_advantages(shaped, graded, np.zeros(size), "std", "mean")
    found = collections.defaultdict(list)
    for n in nodes:
        found[n["agent"]].append(advantage[n["slot"]])
    return found


def test_a_step_draws_until_enough_trees_teach_and_spends_nothing_on_the_others(finished):
    config, workdir, scored = finished
    rows = {row["step"]: row for row in read_metrics(workdir / "metrics.jsonl")}
    names = list(ANSWERS)
    rates, position = PassRates(), 0
    data = config.data
    curriculum = Curriculum(data.curriculum_low, data.curriculum_high, data.curriculum_floor, data.curriculum_decay)
    expected_scores, kept = [], collections.Counter()
    for step in (1, 2, 3):
        trees, row = read_trees(trees_path(workdir, step)), rows[step]
        assert [tree["tree"] for tree in trees] == list(range(len(trees)))
        telling = []
        learned = collections.Counter()
        for tree in trees:
            by_agent = advantages(tree, config)
            teaches = {name for name in ("ann", "bob") if any(by_agent[name])}
            telling.append(bool(teaches))
            learned.update({name: len(by_agent[name]) for name in teaches})
            for n in tree["nodes"]:
                if not teaches:
                    assert n["shaped"] is None and n["advantage"] is None
        # Round by round: as many as are missing, at most two rounds more.
        rounds, drawn, missing = 0, 0, 3
        while missing and rounds < 3:
            indices, position = next_problems(len(names), config.seed, position, missing, curriculum, rates)
            assert [names[i] for i in indices] == [tree["problem"] for tree in trees[drawn : drawn + missing]]
            rounds, drawn = rounds + 1, drawn + missing
            missing = 3 - sum(telling[:drawn])
        assert drawn == len(trees)
        assert (row["search/rounds"], row["search/trees"]) == (rounds, len(trees))
        assert row["search/trees_dropped"] == telling.count(False)
        for tree in trees:
            rewards = [n["reward"] for n in tree["nodes"] if n["status"] == "GRADED"]
            rates.observe(names.index(tree["problem"]), float(np.mean(np.asarray(rewards) == 1)), data.curriculum_decay)
        assert row["curriculum/problems_tried"] == len(rates)
        assert row["curriculum/in_band"] == rates.share(curriculum)
        for name in ("ann", "bob"):
            # By the weights, and by the reference's after the first update.
            first = kept[name] < config.learning.train_batch_size
            expected_scores += [learned[name]] * ((1 if first else 2) if learned[name] else 0)
            kept[name] += learned[name]
            assert row[f"agent/{name}/updates"] == kept[name] // config.learning.train_batch_size
            assert row[f"agent/{name}/buffer"] == kept[name] % config.learning.train_batch_size
    assert scored == expected_scores
    written = sum(row[f"agent/{name}/nodes"] for row in rows.values() for name in ("ann", "bob"))
    assert 0 < sum(kept.values()) < written and max(row["search/rounds"] for row in rows.values()) > 1
    state = final_state(workdir)
    assert dict(zip(state["data.pass_rates/index"].tolist(), state["data.pass_rates/rate"].tolist(), strict=True)) == {
        i: rates[i] for i in range(len(names)) if rates[i] is not None
    }


def graded_before_round_two(workdir: pathlib.Path, step: int) -> int:
    """Programs that were graded in the first round of a step; it has another."""
    trees = read_trees(trees_path(workdir, step))
    assert len(trees) > 3
    return sum(len(tree["nodes"]) for tree in trees[:3])


def step_with_two_rounds(workdir: pathlib.Path) -> int:
    return next(row["step"] for row in read_metrics(workdir / "metrics.jsonl") if row["search/rounds"] > 1)


def start_before(step: int, workdir: pathlib.Path, copy: pathlib.Path) -> None:
    """A run as it was before a step."""
    if step > 1:
        shutil.copytree(workdir, copy)
        for later in range(step, 4):
            shutil.rmtree(copy / "checkpoints" / str(later))


class Killed(BaseException):
    """As a SIGKILL: nothing that the run would do at its end is done."""


@pytest.mark.parametrize("how", ["terminated", "killed"])
def test_a_stop_in_the_second_round_changes_nothing(finished, tmp_path, monkeypatch, how):
    config, workdir, _ = finished
    step = step_with_two_rounds(workdir)
    first = graded_before_round_two(workdir, step)
    start_before(step, workdir, tmp_path / "run")
    submit, count = Grader.submit, 0

    def submit_and_stop(self, program, problem, **options):
        nonlocal count
        count += 1
        if count == first + 3:
            if how == "killed":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        return submit(self, program, problem, **options)

    monkeypatch.setattr(Grader, "submit", submit_and_stop)
    if how == "killed":
        with pytest.raises(Killed):
            run(config, tmp_path / "run")
        assert not list((tmp_path / "run").glob("pending_search_*"))
    else:
        assert "stopped on request" in run(config, tmp_path / "run")
        names = [f"pending_search_{step:06d}.npz", f"pending_search_{step:06d}_round_2.npz"]
        assert sorted(path.name for path in (tmp_path / "run").glob("pending_search_*")) == names
        count = 10**9
    again = count
    run(config, tmp_path / "run")
    if how == "terminated":
        # What the first round graded is not graded again.
        everything = sum(len(t["nodes"]) for s in range(step, 4) for t in read_trees(trees_path(workdir, s)))
        assert count - again <= everything - first
    assert not list((tmp_path / "run").glob("pending_search_*"))
    for number in (1, 2, 3):
        assert trees_path(workdir, number).read_text() == trees_path(tmp_path / "run", number).read_text()
    straight, stopped = final_state(workdir), final_state(tmp_path / "run")
    if how == "killed":
        assert_same_bits(straight, stopped)
    assert straight.keys() == stopped.keys()
    for name in straight:
        # Half a response is read again in one go, which rounds otherwise than token by token.
        np.testing.assert_allclose(stopped[name], straight[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_killed_in_the_second_round_and_resumed_gives_the_same_bits(finished, tmp_path):
    config, workdir, _ = finished
    step = step_with_two_rounds(workdir)
    file = tmp_path / "config.py"
    file.write_text(
        f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({config.to_dict()!r})\n"
    )
    command = [sys.executable, "-m", "mars2_jax.train", f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        # Said when the second round begins.
        assert any(line.startswith(f"step {step}/3: search 24/24") for line in process.stdout)
        process.kill()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert f"step {step}/3: resample" in again.stdout
    assert_same_bits(final_state(workdir), final_state(tmp_path / "run"))
    for number in (1, 2, 3):
        assert trees_path(workdir, number).read_text() == trees_path(tmp_path / "run", number).read_text()


def test_without_others_drawn_a_step_goes_on_with_fewer_trees(finished, tmp_path):
    config = finished[0].copy_and_resolve_references()
    config.data.update(max_resamples=0)
    config.training.steps = 1
    run(config, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    trees = read_trees(trees_path(tmp_path, 1))
    assert (row["search/rounds"], row["search/trees"], len(trees)) == (1, 3, 3)
    learned = collections.Counter()
    for tree in trees:
        by_agent = advantages(tree, config)
        learned.update({name: len(by_agent[name]) for name in ("ann", "bob") if any(by_agent[name])})
    for name in ("ann", "bob"):
        assert row[f"agent/{name}/updates"] * 4 + row[f"agent/{name}/buffer"] == learned[name]
        assert row[f"agent/{name}/nodes"] >= learned[name]
    responses = lambda trees: [[n["response"] for n in tree["nodes"]] for tree in trees]
    assert responses(trees) == responses(read_trees(trees_path(finished[1], 1))[:3])
