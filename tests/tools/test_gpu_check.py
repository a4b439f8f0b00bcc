"""The GPU script: without a GPU it says so; all of it runs on the CPU; it cleans up, and ends in time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools/gpu_check.py"


def run(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Anywhere but in the checkout, and without it on the path: the script finds the package."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**plain, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert "no GPU is at hand" in run("--json", str(out)).stdout
    assert json.loads(out.read_text()) == {"script": "gpu_check", "ran": False, "device": None, "rows": []}
    assert "--rehearse" in run("--help").stdout


def test_names_packages_that_are_missing(tmp_path: Path) -> None:
    hidden = "import importlib.util as u; find = u.find_spec; "
    hidden += "u.find_spec = lambda name, package=None: None if name in ('msgspec', 'awscrt') else find(name, package)"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    assert run(code=2, PYTHONPATH=str(tmp_path)).stderr == "missing packages: pip install msgspec awscrt\n"


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    out, folder = tmp_path / "result.json", tmp_path / "work"
    folder.mkdir()
    printed = run("--rehearse", "--dir", str(folder), "--json", str(out)).stdout
    assert not list(folder.iterdir())
    result = json.loads(out.read_text())
    assert result["ran"] and result["rehearsal"] and result["ok"] and "a rehearsal" in printed
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["section"], []).append(row)
        assert row["what"] in printed and row["verdict"] in ("ok", "", "not available")
    assert list(rows) == ["correctness", "step_rate", "snapshot_rate", "stalls"]
    verdicts = {row["what"]: row["verdict"] for row in rows["correctness"]}
    assert list(verdicts.values()).count("ok") >= 10
    for section, key in (("step_rate", "over_copy"), ("snapshot_rate", "over_pinned"), ("stalls", "over_synchronous")):
        ratios = [row["values"][key] for row in rows[section] if key in row["values"]]
        assert len(ratios) >= 1 and all(math.isfinite(ratio) for ratio in ratios), section


def test_ends_in_time_and_cleans_up(tmp_path: Path) -> None:
    out, folder = tmp_path / "result.json", tmp_path / "work"
    folder.mkdir()
    run("--rehearse", "--seconds", "0", "--dir", str(folder), "--json", str(out), code=1)
    assert {row["verdict"] for row in json.loads(out.read_text())["rows"]} == {"out of time"}
    assert not list(folder.iterdir())
