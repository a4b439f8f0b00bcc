"""Shared by all tests: hypothesis settings, a place for checkpoints that costs no disk flush, helpers on the path."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # pytest does not add it, as tests are imported by path
    sys.path.insert(0, ROOT)

_SHARED = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=60, **_SHARED)
settings.register_profile("thorough", max_examples=2000, **_SHARED)
settings.load_profile(os.environ.get("ZERO1CKPT_HYPOTHESIS", "default"))


@pytest.fixture
def work():
    """A fresh folder, in memory where the system has a file system there: flushes cost nothing then."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30 else None
    path = Path(tempfile.mkdtemp(prefix="zero1ckpt-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)
