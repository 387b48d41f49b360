"""Says what is in a problem set:

    python -m mars2_jax.problems --source=livecodebench:~/data/lcb

checks it: grades every reference, looks for problems that are there twice, or in another set, too (exit code 1 if there
are any):

    python -m mars2_jax.problems --source=deepcoder:~/data/deepcoder --check --against=livecodebench:~/data/lcb

or builds it: writes it to a folder from which problems are read as they are needed, which then is a source itself:

    python -m mars2_jax.problems --source=deepcoder:~/data/deepcoder --build=~/data/built
"""

import contextlib
import json
import sys

from absl import flags

from mars2_jax import command
from mars2_jax.errors import ConfigError

_SOURCE = flags.DEFINE_string("source", None, "Problem set, as in config.data.source.", required=True)
_SPLIT = flags.DEFINE_string("split", "all", "Look at this split only.")
_PUBLIC_TESTS = flags.DEFINE_integer("public_tests", 2, "As config.data.public_tests.", lower_bound=0)
_CHECK = flags.DEFINE_bool("check", False, "Grade references and look for duplicates.")
_AGAINST = flags.DEFINE_string("against", None, "Another source, of which no passage may stand in this one.")
_AGAINST_SPLIT = flags.DEFINE_string("against_split", "all", "The split of it.")
_NGRAM = flags.DEFINE_integer("ngram", 13, "Words of a passage for --against.", lower_bound=1)
_NEAR = flags.DEFINE_float("near", 0.8, "Jaccard index of near duplicates; above 1 is off.", lower_bound=0.01)
_ISOLATION = flags.DEFINE_enum("isolation", "bubblewrap", ["bubblewrap", "none"], "As config.grading.isolation.")
_WORKERS = flags.DEFINE_integer("workers", 0, "As config.grading.workers.", lower_bound=0)
_BUILD = flags.DEFINE_string("build", None, "Folder to write the set to.")
_SKIP_BAD = flags.DEFINE_bool("skip_bad", False, "Leave out records that cannot be read, and say which.")
_JSON = flags.DEFINE_string("json", None, "File to write what was found to, as JSON.")


def main() -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    assert _SOURCE.value is not None  # a required flag
    working = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f} problems"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    if _BUILD.value is not None:
        _build(working, working.add_task("build", total=None))
    else:
        _look(working, working.add_task("look", total=None), Console())


def _build(working, task) -> None:
    if _CHECK.value or _AGAINST.value is not None or _SPLIT.value != "all":
        raise ConfigError("--build takes the whole source and checks nothing: give --check, --against or --split apart")
    from mars2_jax.tasks.build import build

    assert _SOURCE.value is not None and _BUILD.value is not None
    tell = lambda error: print("left out:", error, file=sys.stderr)
    with working:
        build(
            _SOURCE.value,
            _BUILD.value,
            public_tests=_PUBLIC_TESTS.value,
            on_bad=tell if _SKIP_BAD.value else None,
            progress=lambda done: working.update(task, completed=done),
        )
    print("built", _BUILD.value)


def _look(working, task, console) -> None:
    from mars2_jax.files import storage, write_atomically
    from mars2_jax.tasks.audit import audit
    from mars2_jax.tasks.sources import split_entries
    from mars2_jax.viewer.problems import print_findings, print_inventory

    if _CHECK.value and _SKIP_BAD.value:
        raise ConfigError("--check tells of every record that cannot be read: leave --skip_bad out")

    def read(bad):
        tell = bad if _CHECK.value or _SKIP_BAD.value else None
        return split_entries(_SOURCE.value, _SPLIT.value, public_tests=_PUBLIC_TESTS.value, on_bad=tell)

    with contextlib.ExitStack() as stack:
        grader = None
        if _CHECK.value:
            from mars2_jax.grading.grader import Grader

            grader = stack.enter_context(Grader(isolation=_ISOLATION.value, workers=_WORKERS.value))
        stack.enter_context(working)
        found = audit(
            read,
            grader,
            duplicates=_CHECK.value,
            against=() if _AGAINST.value is None else split_entries(_AGAINST.value, _AGAINST_SPLIT.value),
            ngram=_NGRAM.value,
            near=_NEAR.value,
            progress=lambda done: working.update(task, completed=done),
        )
    findings = found.findings
    print_inventory(console, _SOURCE.value, found.inventory)
    print_findings(console, findings)
    if _JSON.value is not None:
        with storage(_JSON.value):
            write_atomically(_JSON.value, json.dumps(found.as_json(), indent=2, ensure_ascii=False) + "\n")
    if not found.sound:
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)
