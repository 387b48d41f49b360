#!/usr/bin/env bash
# Format, lint and type checks, then the tests.
#
#   bash launch/test.sh [--all] [pytest options]
#
# --all includes the tests marked slow. TEST_WORKERS=n spreads the files of tests over n processes, two by default where
# there are two cores; each of them compiles for itself and holds its own models, so that more workers than idle cores or
# memory make it slower.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
options=()
for argument in "$@"; do
  if [[ "$argument" == --all ]]; then selection=(); else options+=("$argument"); fi
done

bash launch/env.sh test

# Tests that need several devices force them in processes of their own; nothing is fetched from a model hub.
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say() { echo "[test] $*" >&2; }
say "ruff"
.venv/bin/python -m ruff check --quiet .
.venv/bin/python -m ruff format --check --quiet .
say "mypy"
.venv/bin/python -m mypy --no-error-summary
say "pytest"
workers="${TEST_WORKERS:-$(($(nproc) > 1 ? 2 : 0))}"
exec .venv/bin/python -m pytest -n "$workers" --dist loadfile --durations=15 "${selection[@]}" "${options[@]}"
