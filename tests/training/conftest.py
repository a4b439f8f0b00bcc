"""Lets the tests here import ``tests.training.scenario``, also where pytest is not started as ``python -m pytest``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.engine import harness  # noqa: E402  the path comes first

# Ranks are forked from a server: what it has loaded, no rank has to load.
harness._CONTEXT.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo.config", "zero1ckpt.training", "tests.training.scenario"]
)
