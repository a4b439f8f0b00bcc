#!/usr/bin/env bash
# Makes the project's virtual environment: the versions pinned in requirements/ci.txt, and this checkout, editable.
# Needs python3 >= 3.10 with venv and pip. Does nothing when nothing has changed.
#
#   bash tools/setup_venv.sh      makes it
#   . tools/setup_venv.sh         makes it, puts its bin folder first on PATH and sets ZERO1CKPT_VENV
#
# ZERO1CKPT_VENV    where (default: .venv in the checkout)
# ZERO1CKPT_PYTHON  the Python to make it with (default: the first fit one of python3, python3.13, ... python3.10)

_z1_say() { printf '%s\n' "setup: $*" >&2; }

_z1_fit() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

_z1_find_python() {
    local candidate
    for candidate in ${ZERO1CKPT_PYTHON:+"$ZERO1CKPT_PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if _z1_fit "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
        if [ "$candidate" = "${ZERO1CKPT_PYTHON:-}" ]; then
            _z1_say "ZERO1CKPT_PYTHON=$candidate is no Python >= 3.10 with venv and pip"
            return 1
        fi
    done
    _z1_say "found no Python >= 3.10 with venv and pip; install one (on Debian: python3 and python3-venv)"
    return 1
}

# What the environment depends on, as one line.
_z1_wanted() {
    "$1" - "$2" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = ("requirements/ci.txt", "pyproject.toml", "tools/setup_venv.sh")
digest = hashlib.sha256(b"".join((root / name).read_bytes() + b"\0" for name in names)).hexdigest()
print("%d.%d.%d" % sys.version_info[:3], digest, root)
PY
}

# pip, again after a pause when it fails: a dropped connection is the usual reason.
_z1_pip() {
    local try
    for try in 1 2 3; do
        if "$ZERO1CKPT_VENV/bin/python" -m pip --disable-pip-version-check --retries 5 "$@" >&2; then
            return 0
        fi
        if [ "$try" -lt 3 ]; then
            _z1_say "pip failed, trying again in $((try * 5)) s"
            sleep "$((try * 5))"
        fi
    done
    _z1_say "pip failed three times: pip $*"
    return 1
}

_z1_have() {
    if [ -f "$ZERO1CKPT_VENV/.zero1ckpt-stamp" ]; then
        cat "$ZERO1CKPT_VENV/.zero1ckpt-stamp"
    fi
}

_z1_make() {
    local root="$1" python="$2" wanted="$3" stamp="$ZERO1CKPT_VENV/.zero1ckpt-stamp" have
    have="$(_z1_have)"
    if [ "$have" = "$wanted" ]; then
        return 0
    fi
    printf 'unfinished\n' >"$stamp" || return 1
    if [ "${have%% *}" != "${wanted%% *}" ]; then
        _z1_say "making $ZERO1CKPT_VENV with Python ${wanted%% *}"
        find "$ZERO1CKPT_VENV" -mindepth 1 -maxdepth 1 ! -name '.zero1ckpt-*' -exec rm -rf {} + || return 1
        "$python" -m venv "$ZERO1CKPT_VENV" || return 1
    fi
    _z1_say "installing the packages pinned in requirements/ci.txt"
    _z1_pip install -qq --only-binary :all: -r "$root/requirements/ci.txt" || return 1
    _z1_say "installing this checkout, editable"
    # compat: a plain path entry, which costs the command line no time at every start
    _z1_pip install -qq --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$root" || return 1
    printf '%s\n' "$wanted" >"$stamp"
}

_z1_setup() {
    local root python wanted
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return 1
    ZERO1CKPT_VENV="${ZERO1CKPT_VENV:-$root/.venv}"
    case "$ZERO1CKPT_VENV" in
        /*) ;;
        *) ZERO1CKPT_VENV="$PWD/$ZERO1CKPT_VENV" ;;
    esac
    export ZERO1CKPT_VENV
    python="$(_z1_find_python)" || return 1
    wanted="$(_z1_wanted "$python" "$root")" || return 1
    if [ "$(_z1_have)" != "$wanted" ]; then
        # Only a folder that this script has made is ever emptied.
        if [ -d "$ZERO1CKPT_VENV" ] && [ ! -f "$ZERO1CKPT_VENV/.zero1ckpt-lock" ] &&
            [ -n "$(ls -A "$ZERO1CKPT_VENV")" ]; then
            _z1_say "$ZERO1CKPT_VENV was not made by tools/setup_venv.sh; set ZERO1CKPT_VENV to another folder"
            return 1
        fi
        mkdir -p "$ZERO1CKPT_VENV" || return 1
        (
            # Of two at once the second waits, and then finds the work done.
            if command -v flock >/dev/null 2>&1; then
                flock 9 || exit 1
            fi
            _z1_make "$root" "$python" "$wanted"
        ) 9>"$ZERO1CKPT_VENV/.zero1ckpt-lock" || return 1
    fi
    export PATH="$ZERO1CKPT_VENV/bin:$PATH"
}

_z1_setup
