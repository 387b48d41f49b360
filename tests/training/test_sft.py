"""Fine-tuning from the command down: what is learned, what is left behind, what a mistake is told."""

import collections
import io
import json
import os
import pathlib
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console

from mars2_jax.config import as_json
from mars2_jax.errors import ConfigError, DataError
from mars2_jax.grading.grader import Grader
from mars2_jax.models.files import open_checkpoint
from mars2_jax.models.tokenizer import load_tokenizer
from mars2_jax.models.weights import load
from mars2_jax.rollout.engine import Engine
from mars2_jax.rollout.types import Request, SamplingParams
from mars2_jax.search.writer import Attempt, Draft
from mars2_jax.tasks.build import build
from mars2_jax.tasks.sources import load as load_problems
from mars2_jax.training import pairs, sft
from mars2_jax.training.agent import make_prompter
from mars2_jax.training.checkpoint import Checkpointer
from mars2_jax.training.examples import ExampleSets, make_examples
from mars2_jax.training.export import export_agent
from mars2_jax.training.metrics import read_metrics
from mars2_jax.training.pairs import PairSources, grade_parents
from mars2_jax.training.setup import Setup
from mars2_jax.training.sft import fine_tune
from mars2_jax.training.trainer import train
from mars2_jax.training.trees import read_trees, trees_path
from mars2_jax.training.writer import EngineWriter
from mars2_jax.validation import validate
from tests.training.dying import Moment, start, write_config
from tests.training.test_trainer import assert_same_bits, final_state
from tests.training.tiny_team import ANSWERS, PROGRAMS, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compiles")

QUIET = Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sft")


def sft_config(folder, **changes) -> ConfigDict:
    config = tiny_config(folder)
    config.rollout.max_new_tokens = 64  # the references are written byte by byte
    config.sft.update(dict(held_out=0.0, batch_size=4, learning_rate=3e-3) | changes)
    return config


def run(config: ConfigDict, workdir, agent: str | None = "ann") -> str:
    validate(config)
    out = io.StringIO()
    fine_tune(FrozenConfigDict(config), str(workdir), agent, Console(file=out, width=200))
    return out.getvalue()


def tokenizer_of(config, name="ann"):
    path = config.agents[name].model.path
    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint, path)


def examples(config: ConfigDict, agent: str = "ann") -> tuple[ExampleSets, str]:
    validate(config)
    config = FrozenConfigDict(config)
    pairs = PairSources(config)
    grades = grade_parents(config, pairs, QUIET)
    return make_examples(config, agent, tokenizer_of(config, agent), pairs, grades)


def write_pairs(path: pathlib.Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"pairs:{path}"


EIGHT = [{"prompt": f"Task {i}.", "response": PROGRAMS[i] + "#" * (i % 3)} for i in range(8)]


@pytest.fixture(scope="module")
def overfit(folder):
    """A run that learns eight pairs by heart: config, workdir, output."""
    config = sft_config(folder, sources=(write_pairs(folder / "eight.jsonl", *EIGHT),), epochs=60, batch_size=8)
    config.sft.update(checkpoint_every=50)
    config.learning.micro_batch_size = 4
    return config, folder / "run", run(config, folder / "run")


def test_it_learns_eight_pairs_by_heart_and_the_export_says_them(overfit, tmp_path):
    """Greedy decoding of what `convert` writes: the answers, each with the end of its turn."""
    config, workdir, _ = overfit
    export_agent(FrozenConfigDict(config), str(workdir), "ann", str(tmp_path / "out"), console=QUIET)
    with open_checkpoint(str(tmp_path / "out")) as checkpoint:
        decoder, tokenizer = load(checkpoint), load_tokenizer(checkpoint, str(tmp_path / "out"))
    engine = Engine(decoder, slots=8, chunk=8, capacity=256, stop_ids=tokenizer.stop_ids)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=16)
    for i, pair in enumerate(EIGHT):
        messages = [{"role": "system", "content": "You are ann."}, {"role": "user", "content": pair["prompt"]}]
        engine.submit(Request(i, tokenizer.encode_chat(messages), np.zeros(2, np.uint32), greedy))
    said = {}
    while engine.pending:
        said |= {done.id: done for done in engine.step()}
    for i, pair in enumerate(EIGHT):
        assert tokenizer.decode(said[i].tokens) == pair["response"]
        assert said[i].finish == "stop" and said[i].tokens[-1] == tokenizer.end_of_turn()


def test_what_it_leaves_behind_and_says(overfit):
    config, workdir, printed = overfit
    rows = read_metrics(workdir / "ann" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    for name in ("loss", "entropy", "grad_norm", "learning_rate", "tokens"):
        assert all(np.isfinite(row[f"sft/{name}"]) for row in rows)
    assert rows[-1]["sft/loss"] < 0.1 < rows[0]["sft/loss"]
    assert json.loads((workdir / "ann" / "config.json").read_text())["sft"]["epochs"] == 60
    assert any((workdir / "ann" / "tensorboard").iterdir()) and not (workdir / "bob").exists()
    assert "ann: 8 pairs of" in printed and "60 updates" in printed and "mars2_jax.convert" in printed
    # A finished run is only shown again.
    again = run(config, workdir)
    assert "ann has made its 60 updates" in again and "loading" not in again


def test_the_export_is_where_training_starts(overfit, tmp_path):
    config, workdir, _ = overfit
    out = io.StringIO()
    export_agent(
        FrozenConfigDict(config), str(workdir), "ann", str(tmp_path / "out"), console=Console(file=out, width=200)
    )
    assert "wrote ann after 60 updates to" in out.getvalue()
    config = config.copy_and_resolve_references()
    config.agents.ann.model.path = str(tmp_path / "out")
    del config.agents["bob"]
    (agent,) = Setup.check(FrozenConfigDict(config)).team()
    tuned = {name: x for name, x in final_state(workdir / "ann").items() if "params" in name}
    started = jax.tree_util.tree_leaves_with_path(agent.state.params)
    assert len(started) == len(tuned)
    for (_, got), want in zip(started, tuned.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


def test_agents_one_after_the_other_on_references(folder, tmp_path):
    """All that learn, each with its own prompts; a held-out loss that falls; a schedule over the whole run."""
    config = sft_config(folder, held_out=0.4, epochs=4, evaluate_every=2, schedule="linear", warmup_updates=1)
    config.agents.bob.model.lora.rank = 2
    printed = run(config, tmp_path, agent=None)
    for name in ("ann", "bob"):
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        # Three problems are learned from, four times, by four; and two are held out.
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        held = [row["sft/held_out_loss"] for row in rows if "sft/held_out_loss" in row]
        assert [("sft/held_out_loss" in row) for row in rows] == [True, False, True, True]
        assert held[-1] < held[0]
        np.testing.assert_allclose([row["sft/learning_rate"] for row in rows[1:]], [3e-3, 3e-3, 1.5e-3], rtol=1e-5)
        assert f"{held[0]:.3f}" in printed and f"{held[-1]:.3f}" in printed
    state = final_state(tmp_path / "bob")
    assert state and not any("embed" in name for name in state)
    export_agent(FrozenConfigDict(config), str(tmp_path), "bob", str(tmp_path / "out"), console=QUIET)
    with open_checkpoint(str(tmp_path / "out")) as checkpoint:
        load(checkpoint)


def test_prompts_are_those_of_the_agent_and_targets_are_fenced_references(folder):
    config = sft_config(folder)
    for name in ("ann", "bob"):
        sets, line = examples(config, name)
        tokenizer = tokenizer_of(config, name)
        prompter = make_prompter(name, FrozenConfigDict(config), tokenizer)
        problems = load_problems(config.data.source, "train")
        assert len(sets.learned) == len(problems) == len(ANSWERS)
        for problem, prompt, response in zip(problems, sets.learned.prompts, sets.learned.responses, strict=True):
            np.testing.assert_array_equal(prompt, prompter.attempt(problem))
            assert f"You are {name}." in tokenizer.decode(prompt)
            assert response[-1] == tokenizer.end_of_turn() in tokenizer.stop_ids
            assert tokenizer.decode(response) == f"```python\n{problem.reference}\n```"
    assert line.startswith("bob: 5 pairs of") and line.endswith("0 of all are refinements")


def test_a_set_that_was_built_is_the_same(folder, tmp_path):
    config = sft_config(folder, held_out=0.3)
    expected, _ = examples(config)
    build(config.data.source, str(tmp_path / "built"))
    config.data.source = str(tmp_path / "built")
    assert examples(config)[0].fingerprint() == expected.fingerprint()


@pytest.fixture(scope="module")
def searched(folder):
    """A step of training, and every prompt of it: by agent, problem and the program that is refined."""
    config = tiny_config(folder)
    config.training.update(steps=2, evaluate=False)
    config.search.nodes = 12
    asked, submit = {}, EngineWriter.submit

    def spy(self, ticket, problem, previous, key, so_far=None):
        parent = None if previous is None else previous.draft.program
        prompt = self._prompter.attempt(problem) if previous is None else self._prompter.refinement(problem, previous)
        asked[self.name, problem.id, parent] = prompt
        submit(self, ticket, problem, previous, key, so_far)

    EngineWriter.submit = spy
    try:
        train(FrozenConfigDict(config), str(folder / "searched"), QUIET)
    finally:
        EngineWriter.submit = submit
    trees = [tree for step in (1, 2) for tree in read_trees(trees_path(folder / "searched", step))]
    return config, folder / "searched", trees, asked


def test_what_passed_in_a_run_with_the_very_prompts_of_that_run(searched):
    config, workdir, trees, asked = searched
    config = config.copy_and_resolve_references()
    config.sft.update(sources=(f"trees:{workdir}",), held_out=0.0, authors="itself")
    refinements, everything = 0, {}
    for name in config.agents:
        expected = {}
        for tree in trees:
            programs = {0: None} | {node["slot"]: node["program"] for node in tree["nodes"]}
            for node in tree["nodes"]:
                if node["verdict"] == "pass" and node["agent"] == name:
                    expected[tree["problem"], programs[node["parent"]], node["response"]] = None
        everything |= expected
        if not expected:
            with pytest.raises(DataError, match="answers of other agents"):
                examples(config, name)
            continue
        sets, line = examples(config, name)
        assert len(sets.learned) == len(expected)
        tokenizer = tokenizer_of(config, name)
        for (problem, parent, response), prompt, tokens in zip(
            expected, sets.learned.prompts, sets.learned.responses, strict=True
        ):
            # Byte for byte what the search asked.
            np.testing.assert_array_equal(prompt, asked[name, problem, parent])
            np.testing.assert_array_equal(tokens[:-1], tokenizer.encode(response))
            refinements += parent is not None
    assert refinements > 0
    config.sft.authors = "anyone"
    every, line = examples(config, "ann")
    assert len(every.learned) == len(everything) > 0
    assert f"{sum(parent is not None for _, parent, _ in everything)} of all are refinements" in line


def test_a_refinement_of_a_record_is_asked_as_the_grader_says(folder):
    """Its program is graded, as in a search; a program that fails in another way makes another prompt."""
    config = sft_config(folder)
    path = pathlib.Path(config.data.source)
    wrong, broken = "def f(x):\n    return x - 1\n", "def f(x):\n    return x / 0\n"
    records = [
        {"problem": "double", "program": "def f(x):\n    return 2 * x", "parent": {"program": parent}}
        for parent in (wrong, broken, "")
    ]
    config.sft.sources = (write_pairs(folder / "refine.jsonl", *records),)
    sets, line = examples(config)
    assert line.endswith("3 of all are refinements")
    prompter = make_prompter("ann", FrozenConfigDict(config), tokenizer_of(config))
    (problem,) = [p for p in load_problems(str(path), "train") if p.id == "double"]
    with Grader(workers=1) as grader:
        for parent, prompt in zip((wrong, broken, ""), sets.learned.prompts, strict=True):
            grade = grader.grade(parent, problem)
            attempt = Attempt(3, 1, 1, 2, Draft(9, "said", parent, None), grade)
            np.testing.assert_array_equal(prompt, prompter.refinement(problem, attempt))
    assert "returned `1`" in tokenizer_of(config).decode(sets.learned.prompts[0])
    assert "ZeroDivisionError" in tokenizer_of(config).decode(sets.learned.prompts[1])


def test_roles_on_shared_weights_are_asked_under_each(folder):
    config = sft_config(folder)
    for key in ("model", "optimizer"):
        config.agents.bob[key] = tiny_config(folder).agents.ann[key].copy_and_resolve_references()
    shared = config.copy_and_resolve_references()
    from mars2_jax.config import agent_config

    shared.agents.bob = agent_config()
    shared.agents.bob.update(role="You are bob.", share_weights_with="ann")
    sets, _ = examples(shared)
    text = [tokenizer_of(config).decode(prompt) for prompt in sets.learned.prompts]
    assert len(text) == 2 * len(ANSWERS)
    assert [("You are ann." in t, "You are bob." in t) for t in text] == [(True, False), (False, True)] * len(ANSWERS)


def test_what_is_held_out_is_held_out_whole(folder):
    """Attempts and refinements of one problem are on one side, the same side whatever else there is."""
    config = sft_config(folder, held_out=0.4)
    answers = [{"problem": name, "program": f"def f(x):\n    return {ANSWERS[name]}"} for name in ANSWERS]
    more = [record | {"parent": {"program": ""}} for record in answers]
    source = write_pairs(folder / "held.jsonl", *answers, *more)
    config.sft.sources = ("references", source)
    both, _ = examples(config)
    assert (len(both.learned), len(both.held_out)) == (9, 6)
    asked = lambda part: {tokenizer_of(config).decode(p).split("Examples")[0] for p in part.prompts}
    assert not asked(both.learned) & asked(both.held_out)
    config.seed = 1
    assert examples(config)[0].fingerprint() != both.fingerprint()


def test_what_is_too_long_is_left_out_and_counted(folder):
    config = sft_config(folder)
    long = {"prompt": "Hi. " * 300, "response": "Yes."}
    config.sft.sources = (write_pairs(folder / "long.jsonl", *EIGHT, long, {"prompt": "Hi.", "response": "y" * 64}),)
    sets, line = examples(config)
    assert len(sets.learned) == 8
    assert "1 answers above config.rollout.max_new_tokens=64" in line
    assert "1 prompts above config.rollout.max_prompt_tokens=700" in line
    config.sft.sources = ("references",)
    config.rollout.max_new_tokens = 8
    with pytest.raises(DataError, match="nothing that agent 'ann' could learn from; left out: 5 answers above config"):
        examples(config)


def assert_same_runs(whole: pathlib.Path, pieces: pathlib.Path) -> None:
    assert_same_bits(final_state(whole), final_state(pieces))
    rows = [read_metrics(path / "metrics.jsonl") for path in (whole, pieces)]
    drop = lambda row: {name: x for name, x in row.items() if name not in ("wall", "time/update_seconds")}
    assert [drop(row) for row in rows[0]] == [drop(row) for row in rows[1]]


def stop_at(update: int, monkeypatch) -> None:
    """SIGTERM in the update that this process makes as number `update`."""
    fit, count = sft.fit, 0

    def fit_and_stop(*arguments):
        nonlocal count
        count += 1
        if count == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return fit(*arguments)

    monkeypatch.setattr(sft, "fit", fit_and_stop)


def test_killed_and_stopped_and_resumed_it_ends_with_the_same_bits(overfit, tmp_path, monkeypatch):
    """SIGKILL in update 52, SIGTERM in update 54, beside the run that was left alone."""
    config, whole, _ = overfit
    file = write_config(config, tmp_path / "config.py")
    start("mars2_jax.sft", file, tmp_path / "run", Moment("update", steps=1, count=1), "--agent=ann")
    stop_at(4, monkeypatch)
    printed = run(config, tmp_path / "run")
    assert "resuming after update 50" in printed and "stopped on request" in printed
    with Checkpointer(tmp_path / "run" / "ann", read_only=True) as checkpointer:
        assert checkpointer.latest()[0] == 54  # between two checkpoints of the schedule
    assert "resuming after update 54" in run(config, tmp_path / "run")
    assert_same_runs(whole / "ann", tmp_path / "run" / "ann")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_packed_and_measured_runs_resume_with_the_same_bits(folder, tmp_path, monkeypatch):
    """Killed while it saves, killed in an update, stopped: with held-out losses, packed rows and a schedule."""
    config = sft_config(folder, held_out=0.2, epochs=12, evaluate_every=3, checkpoint_every=2, schedule="cosine")
    config.rollout.max_prompt_tokens, config.learning.pack_tokens = 256, 320
    run(config, tmp_path / "whole")
    file = write_config(config, tmp_path / "config.py")
    start("mars2_jax.sft", file, tmp_path / "run", Moment("saving", steps=1, count=2), "--agent=ann")
    printed = start("mars2_jax.sft", file, tmp_path / "run", Moment("update", count=4), "--agent=ann")
    assert "resuming after update 2" in printed
    stop_at(3, monkeypatch)
    printed = run(config, tmp_path / "run")
    assert "resuming after update 6" in printed and "stopped on request" in printed
    assert "resuming after update 9" in run(config, tmp_path / "run")
    assert_same_runs(tmp_path / "whole" / "ann", tmp_path / "run" / "ann")


@pytest.mark.parametrize("size, updates", [(12, 2), (400, 1)])
def test_every_pair_is_learned_so_many_times_and_no_more(folder, tmp_path, size, updates):
    """A last batch is a short one, and a batch is no larger than all there is."""
    source = write_pairs(folder / "eight.jsonl", *EIGHT)
    config = sft_config(folder, sources=(source,), epochs=2, batch_size=size)
    run(config, tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run" / "ann" / "metrics.jsonl") if "sft/tokens" in row]
    learned = ExampleSets.load(tmp_path / "run" / "ann" / "examples.npz").learned
    assert len(rows) == updates and len(learned) == 8
    assert sum(row["sft/tokens"] for row in rows) == 2 * sum(map(len, learned.responses))


@pytest.fixture
def resumable(overfit, tmp_path):
    config, workdir, _ = overfit
    shutil.copytree(workdir, tmp_path / "run")
    return config.copy_and_resolve_references(), tmp_path / "run"


def test_another_config_is_refused_and_what_does_not_matter_may_change(resumable):
    config, workdir = resumable
    config.search.nodes, config.training.steps, config.sft.checkpoint_every = 3, 9, 7
    config.agents.bob.role = "Someone else."
    run(config, workdir)
    for key, value in (("learning_rate", 1.0), ("batch_size", 12)):
        other = config.copy_and_resolve_references()
        other.sft[key] = value
        with pytest.raises(ConfigError, match=f"config.sft.{key} is .*, but the run in this workdir was started with"):
            run(other, workdir)
    config.agents.ann.role = "Someone else."
    with pytest.raises(ConfigError, match="config.agents.ann.role is 'Someone else.', but the run"):
        run(config, workdir)


def test_other_examples_are_refused(resumable):
    config, workdir = resumable
    path = workdir / "ann" / "examples.npz"
    sets = ExampleSets.load(path)
    ExampleSets(sets.learned.take([1, 0]), sets.held_out).save(path)
    with pytest.raises(ConfigError, match=r"examples.npz is not what the run was started with: choose another"):
        run(config, workdir)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"examples.npz cannot be read .*: start the run over in another --workdir"):
        run(config, workdir)


@pytest.mark.parametrize(
    ("change", "agent", "error", "message"),
    [
        (lambda c: None, "eve", ConfigError, "--agent=eve is not an agent of this config; it has ann, bob"),
        (lambda c: c.agents.bob.update(trainable=False), "bob", ConfigError, "--agent=bob never learns"),
        (
            lambda c: [a.update(trainable=False) for a in c.agents.values()],
            None,
            ConfigError,
            "no agent is trainable: set",
        ),
        (lambda c: c.sft.update(batch_size=3), "ann", ConfigError, "batch_size is 3; it must be a multiple of"),
        (lambda c: c.sft.update(warmup_updates=9), "ann", ConfigError, "warmup_updates is 9, but agent 'ann' makes 3"),
        (lambda c: c.sft.update(sources=()), "ann", ConfigError, "config.sft.sources is empty"),
        (lambda c: c.sft.update(sources=("refs",)), "ann", ConfigError, "config.sft.sources has 'refs'; it may be"),
        (lambda c: c.sft.update(sources=("pairs:",)), "ann", ConfigError, "config.sft.sources has 'pairs:'; it may"),
        (lambda c: c.sft.update(sources=("pairs:/no.jsonl",)), "ann", DataError, "'/no.jsonl' .no such file.: give"),
        (lambda c: c.sft.update(sources=("trees:/no",)), "ann", DataError, "no trees in /no: give the workdir"),
        (lambda c: c.sft.update(authors="itself"), "ann", ConfigError, "authors is 'itself', but no source is trees"),
        (lambda c: c.sft.update(final_learning_rate=1e-6), "ann", ConfigError, "schedule 'constant' does not use it"),
        (lambda c: c.sft.update(evaluate_every=2), "ann", ConfigError, "evaluate_every is 2, but held_out is 0"),
        (lambda c: c.sft.update(held_out=0.5) or c.data.update(limit=1), "ann", ConfigError, "set it to 0, which"),
        (lambda c: c.data.update(source="/no.jsonl"), "ann", DataError, "/no.jsonl"),
        (lambda c: c.rollout.update(max_prompt_tokens=9000), "ann", ConfigError, "was made for 4096"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(folder, tmp_path, change, agent, error, message):
    config = sft_config(folder)
    change(config)
    with pytest.raises(error, match=message):
        run(config, tmp_path / "run", agent)
    assert not (tmp_path / "run").exists()


def test_more_mistakes(folder, searched, tmp_path):
    config = sft_config(folder)
    for source, message in (
        (
            write_pairs(tmp_path / "a.jsonl", {"prompt": "a", "response": "b<|im_end|>"}),
            "a.jsonl:1: the answer holds a",
        ),
        (f"trees:{searched[1]}", "step_000001.jsonl:1: problem '.*' is not in config.data: set it to the problems of"),
    ):
        config.sft.sources = (source,)
        if source.startswith("trees"):
            config.data.source = "starter"
        with pytest.raises(DataError, match=message):
            run(config, tmp_path / "run")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"step": 1, "problem": "double", "tree": 0, "nodes": [{}]}) + "\n")
    config = sft_config(folder, sources=(f"trees:{tmp_path / 'bad.jsonl'}",))
    with pytest.raises(DataError, match="bad.jsonl, line 1: a node lacks the field 'slot'"):
        run(config, tmp_path / "run")
    config = sft_config(folder)
    with pytest.raises(ConfigError, match="holds a training run: choose another"):
        run(config, searched[1])
    assert not (tmp_path / "run").exists()


def test_training_does_not_care_how_it_was_fine_tuned(searched):
    config, workdir, _, _ = searched
    config = config.copy_and_resolve_references()
    config.sft.learning_rate = 1.0
    train(FrozenConfigDict(config), str(workdir), QUIET)
    assert as_json(config)["sft"]["learning_rate"] == 1.0


def test_several_answers_to_one_question_are_held_out_together(folder):
    """Of chats, and of problems that stand in the records, as of those in the problem set."""
    config = sft_config(folder, held_out=0.5)
    tokenizer = tokenizer_of(config)
    chats = [{"prompt": f"Task {i}.", "response": PROGRAMS[j]} for j in range(3) for i in range(4)]
    stated = [
        {"statement": f"Return {i}.", "entry_point": "f", "public": [{"args": [1], "expected": i}], **more}
        for i in range(4)
        for more in (
            {"program": f"def f(x):\n    return {i}"},
            {"program": f"def f(x):\n    return {i} + 0", "parent": {"program": ""}},
        )
    ]
    for records, each in ((chats, 3), (stated, 2)):
        config.sft.sources = (write_pairs(folder / "several.jsonl", *records),)
        sets, _ = examples(config)
        asked = lambda part: [re.search(r"Task \d|Return \d", tokenizer.decode(p))[0] for p in part.prompts]
        assert not set(asked(sets.learned)) & set(asked(sets.held_out))
        assert set(collections.Counter(asked(sets.held_out)).values()) == {each} and len(sets.held_out) == 2 * each


def test_parents_are_graded_once(folder, tmp_path, monkeypatch):
    """A run that was stopped before an agent's first checkpoint goes on with the examples that it has; other pairs
    make others."""
    config = sft_config(folder, batch_size=2)
    record = {"problem": "double", "program": "def f(x):\n    return 2 * x", "parent": {"program": "def f(x): pass"}}
    path = tmp_path / "pairs.jsonl"
    config.sft.sources = (write_pairs(path, record, EIGHT[0], EIGHT[1]),)
    started, start_grader = [], pairs.start_grader
    monkeypatch.setattr(pairs, "start_grader", lambda config: (started.append(1), start_grader(config))[1])
    printed = run(config, tmp_path / "whole", agent=None)
    assert len(started) == 1 and "ann: 3 pairs" in printed

    stop_at(1, monkeypatch)
    assert "stopped on request" in run(config, tmp_path / "run", agent=None)
    assert len(started) == 2 and (tmp_path / "run" / "bob" / "examples.npz").exists()
    assert "bob: 3 pairs" not in run(config, tmp_path / "run", agent=None)
    assert len(started) == 2
    for name in ("ann", "bob"):
        assert_same_runs(tmp_path / "whole" / name, tmp_path / "run" / name)

    shutil.rmtree(tmp_path / "run" / "bob" / "checkpoints")
    write_pairs(path, record, *EIGHT)
    assert "bob: 9 pairs" in run(config, tmp_path / "run", agent=None)
    assert len(started) == 3
    shutil.rmtree(tmp_path / "run" / "bob" / "checkpoints")
    config.agents.bob.role = "Another."
    assert "bob: 9 pairs" in run(config, tmp_path / "run", agent=None)
    assert len(started) == 4


def test_an_answer_in_which_a_model_spelled_the_end_of_a_turn_is_left_out(searched, tmp_path):
    config, workdir, _, _ = searched
    config = config.copy_and_resolve_references()
    shutil.copytree(workdir / "trees", tmp_path / "trees")
    config.sft.update(sources=(f"trees:{tmp_path}",), held_out=0.0)
    before, _ = examples(config)
    file = trees_path(tmp_path, 1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    node = next(n for row in rows for n in row["nodes"] if n["verdict"] == "pass")
    node["response"] += "<|im_end|>"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets, line = examples(config)
    assert "1 answers that hold a token that ends a turn" in line
    assert len(before.learned) - 1 <= len(sets.learned) <= len(before.learned)
