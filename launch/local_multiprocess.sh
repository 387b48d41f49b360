#!/usr/bin/env bash
# Trains with several processes of this machine as one run; each searches and grades its share of the problems.
#
#   bash launch/local_multiprocess.sh CONFIG WORKDIR PROCESSES [--config.key=value ...]
#
# The GPUs (those of CUDA_VISIBLE_DEVICES, where it is set) are shared out evenly; without any, or where CPU_DEVICES=n
# is set, each process has n devices of the CPU. When one process dies the others are ended, all are started again, and
# the run goes on after its last checkpoint: RESTARTS times (3), and never after a mistake of the user (exit code 2).
# SIGTERM and Ctrl-C stop all in good order; the same command goes on.
set -euo pipefail

say() { echo "[launch] $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }

[[ $# -ge 3 ]] || die "usage: bash launch/local_multiprocess.sh CONFIG WORKDIR PROCESSES [--config.key=value ...]"
config="$(realpath -m -- "$1")" workdir="$(realpath -m -- "$2")" processes="$3"
shift 3
[[ "$processes" =~ ^[1-9][0-9]*$ ]] || die "PROCESSES is $processes; it must be a number from 1"
readonly config workdir processes RESTARTS="${RESTARTS:-3}"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
  bash launch/env.sh
  PYTHON=.venv/bin/python
fi

gpus=()
if [[ -z "${CPU_DEVICES:-}" ]]; then
  if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  elif command -v nvidia-smi >/dev/null; then
    mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
  fi
fi
if ((${#gpus[@]} % processes)); then
  die "${#gpus[@]} GPUs cannot be shared out evenly among $processes processes: set CUDA_VISIBLE_DEVICES or CPU_DEVICES"
fi

# start INDEX PORT OPTION...: in the background.
start() {
  local index="$1" port="$2" count=$((${#gpus[@]} / processes))
  shift 2
  if ((count)); then
    local mine="${gpus[*]:index * count:count}"
    export CUDA_VISIBLE_DEVICES="${mine// /,}"
  else
    export JAX_PLATFORMS=cpu
    export XLA_FLAGS="${flags:-} --xla_force_host_platform_device_count=${CPU_DEVICES:-1}"
  fi
  "$PYTHON" -m mars2_jax.train --config="$config" --workdir="$workdir" --num_processes="$processes" \
    --process_id="$index" --coordinator_address="127.0.0.1:$port" "$@" &
}

# Runs all to their end. The exit code is 0 if all have it, 2 if one has that, else that of one that failed.
run() {
  local port index code ended="" worst=0
  port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  running=()
  for ((index = 0; index < processes; index++)); do
    start "$index" "$port" "$@"
    running["$!"]=$index
  done
  while ((${#running[@]})); do
    code=0 ended=""
    wait -n -p ended "${!running[@]}" || code=$?
    if [[ -z "${ended:-}" ]]; then continue; fi # it was a signal to this script that ended the waiting
    index="${running[$ended]}"
    unset "running[$ended]"
    if ((code == 0)); then continue; fi
    if ((worst == 0)); then
      say "process $index ended with exit code $code"
      end_others &
    fi
    if ((worst == 0 || code == 2)); then worst=$code; fi
  done
  return "$worst"
}

# They end by themselves, and say why; unless they cannot.
end_others() {
  local wait="${GRACE:-60}"
  while ((wait-- > 0)); do
    sleep 1
    alive || return 0
  done
  kill -KILL "${!running[@]}" 2>/dev/null || true
}

alive() { kill -0 "${!running[@]}" 2>/dev/null; }

stopping=""
# shellcheck disable=SC2317 # by the trap
stop() {
  stopping=1
  if ((${#running[@]})); then kill -TERM "${!running[@]}" 2>/dev/null || true; fi
}
trap stop TERM INT

declare -a running=()
flags="${XLA_FLAGS:-}"
for ((attempt = 0; ; attempt++)); do
  code=0
  run "$@" || code=$?
  if ((code == 0 || code == 2)) || [[ -n "$stopping" ]]; then exit "$code"; fi
  if ((attempt >= RESTARTS)); then
    say "giving up after $RESTARTS restarts"
    exit "$code"
  fi
  say "starting all again; the run goes on after its last checkpoint"
done
