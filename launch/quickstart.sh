#!/usr/bin/env bash
# Trains the quickstart team on this machine's CPU; arguments go to the command, e.g. --config.training.steps=4.
# Running it again resumes the run in runs/quickstart; remove that folder to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/env.sh
# The tests install libtpu, which would search for a TPU here, at length and with many words.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# Updates fill gigabytes of new memory in every call; in large pages they take about an eighth less time.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec .venv/bin/python -m mars2_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
