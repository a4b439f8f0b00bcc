#!/usr/bin/env bash
# Sets itself up, then trains a small GPT under ZeRO-1, saves, inspects, reshards and resumes it.
#
#   bash tools/quickstart.sh                    four ranks, then two
#   bash tools/quickstart.sh --out DIR          keeps the checkpoints; other options: see zero1ckpt demo --help
#
# ZERO1CKPT_VENV, ZERO1CKPT_PYTHON  see tools/setup_venv.sh
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

exec zero1ckpt demo "$@"
