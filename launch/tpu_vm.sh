#!/usr/bin/env bash
# Trains on all workers of a Cloud TPU slice as one run, from a machine that has gcloud and stays on:
#
#   TPU=NAME ZONE=us-east5-a bash launch/tpu_vm.sh CONFIG WORKDIR [--config.key=value ...]
#
# It copies this checkout to every worker, installs what it needs there, starts the command on all, and starts it again
# when a worker dies or the slice is preempted: RESTARTS times (100), and never after a mistake of the user (exit code
# 2). WORKDIR is a folder that all workers share, such as a Filestore mount. A slice that is gone is waited for or, with
# CREATE="--accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot", made again; SETUP="command" is then run
# on every worker, to mount WORKDIR for one. PROJECT names the project, if it is not gcloud's own. Ctrl-C ends it here
# and the run there, in good order: the same command goes on. JAX takes the coordinates from the TPU.
set -euo pipefail

say() { echo "[launch] $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }

[[ $# -ge 2 && -n "${TPU:-}" && -n "${ZONE:-}" ]] ||
  die "usage: TPU=NAME ZONE=ZONE bash launch/tpu_vm.sh CONFIG WORKDIR [--config.key=value ...]"
command -v gcloud >/dev/null || die "gcloud is missing: install the Google Cloud CLI"
config="$1" workdir="$2"
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly RESTARTS="${RESTARTS:-100}" PAUSE="${PAUSE:-30}"
where=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})

tpu() { gcloud compute tpus tpu-vm "$@" "${where[@]}" --quiet; }
everywhere() { tpu ssh "$TPU" --worker=all --command="$1"; }

state() { tpu describe "$TPU" --format='value(state)' 2>/dev/null || echo ABSENT; }

# Waits until the slice is there, or makes it.
await_slice() {
  local found
  while found="$(state)" && [[ "$found" != READY ]]; do
    case "$found" in
      ABSENT)
        if [[ -n "${CREATE:-}" ]]; then
          say "making the slice $TPU"
          # shellcheck disable=SC2086 # options
          tpu create "$TPU" $CREATE || sleep "$PAUSE"
          continue
        fi
        ;;
      PREEMPTED | TERMINATED)
        if [[ -n "${CREATE:-}" ]]; then
          say "the slice $TPU was taken away ($found)"
          tpu delete "$TPU" || sleep "$PAUSE"
          continue
        fi
        ;;
    esac
    say "waiting for the slice $TPU ($found)"
    sleep "$PAUSE"
  done
}

# This checkout on every worker, as git knows its files, and what it needs.
install() {
  local archive status=0
  archive="$(mktemp --suffix=.tar.gz)"
  git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -czf "$archive"
  tpu scp "$archive" "$TPU:mars2_jax.tar.gz" --worker=all &&
    everywhere "mkdir -p mars2_jax && tar -xzf mars2_jax.tar.gz -C mars2_jax && bash mars2_jax/launch/env.sh tpu" &&
    everywhere "${SETUP:-true}" || status=$?
  rm "$archive"
  return "$status"
}

# A run that lost its connection may still be there for a moment: it holds the lock until it has ended.
command="cd mars2_jax && exec flock --no-fork --timeout 300 ~/mars2_jax.lock .venv/bin/python -m mars2_jax.train"
# A worker that is preempted may be told so, and all stop in good order: with an exit code that is not that of a run
# which is done.
command+="$(printf ' %q' --config="$config" --workdir="$workdir" --stopped_code=85 "$@")"

stop() {
  trap - TERM INT
  say "stopping the run on the slice"
  # One worker that is asked stops all. The process that holds the lock is the run.
  everywhere 'fuser --kill -TERM ~/mars2_jax.lock' >/dev/null 2>&1 || true
  wait "$run" || true
  exit 130
}

for ((attempt = 0; ; attempt++)); do
  await_slice
  code=0
  if install; then
    # In the background, where Ctrl-C does not reach it: the run is to end in good order, see `stop`.
    everywhere "$command" &
    run=$!
    trap stop TERM INT
    wait "$run" || code=$?
    trap - TERM INT
    if ((code == 0 || code == 2)); then exit "$code"; fi
  else
    code=$?
  fi
  if ((attempt >= RESTARTS)); then
    say "giving up after $RESTARTS restarts"
    exit "$code"
  fi
  say "the run ended with exit code $code; starting it again, to go on after its last checkpoint"
  sleep "$PAUSE"
done
