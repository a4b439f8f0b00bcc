"""Lets the tests here import ``tests.training.scenario``, also where pytest is not started as ``python -m pytest``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
