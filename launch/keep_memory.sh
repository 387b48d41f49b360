#!/usr/bin/env bash
# Runs a command whose process keeps the memory that it frees, in large pages: launch/keep_memory.sh COMMAND [ARGUMENT ...]
#
# On CPU an update fills gigabytes of temporary arrays. glibc gives each of them back to the system at once, and the next
# call takes millions of page faults to get them again; in a virtual machine even the host takes part. The process then
# stays as large as its largest update. Variables that are set already stay as they are.
set -euo pipefail

if (( $# == 0 )); then
  echo "error: usage: launch/keep_memory.sh COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
# No arrays in mappings of their own, nothing given back, and one heap that all threads share.
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_:-0}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1000000000000}"
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-1}"
exec "$@"
