#!/usr/bin/env bash
# Sets itself up, then checks and tests everything; stops at the first stage that fails.
#
#   bash tools/test.sh                      lint, types, layers, all tests
#   bash tools/test.sh tests/core -k range  only pytest, with these arguments
#
# ZERO1CKPT_TEST_WORKERS  how many tests run at once (default 2)
# ZERO1CKPT_VENV          see tools/setup_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage() { printf '\n== %s\n' "$*"; }

stage "set-up"
. tools/setup_venv.sh
printf 'python %s in %s\n' "$(python -c 'import platform; print(platform.python_version())')" "$ZERO1CKPT_VENV"

# Tests run side by side, and many start processes of their own: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$#" -gt 0 ]; then
    stage "pytest $*"
    exec python -m pytest -q -rs "$@"
fi

stage "ruff check"
ruff check .

stage "ruff format --check"
ruff format --check .

stage "mypy"
mypy

stage "import-linter"
lint-imports --no-logo

workers="${ZERO1CKPT_TEST_WORKERS:-2}"
tests() { python -m pytest -q -rs -n "$workers" --dist worksteal "$@"; }

stage "pytest, all but slow"
tests -m "not slow"

# Not started where nothing is marked slow: the last line is then the summary of the tests that did run.
if grep -rqE 'mark\.slow' --include='*.py' tests; then
    stage "pytest, slow"
    tests -m slow
fi
