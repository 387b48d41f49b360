#!/usr/bin/env bash
# Resolves launch/requirements.lock anew from setup.py (extras quickstart, endpoint and dev), for Linux and every
# supported Python. Needs uv. The other locks are short and written by hand; a new JAX may ask for another libtpu in
# requirements-tpu.lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv pip compile setup.py --extra quickstart --extra endpoint --extra dev \
  --universal --python-version 3.11 --generate-hashes --no-annotate --upgrade --quiet \
  --custom-compile-command "bash launch/lock.sh" \
  --output-file launch/requirements.lock
