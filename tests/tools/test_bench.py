"""The benchmarks run: each says how, and the step's, small, gives finite ratios and the counts that it must."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "tools/bench").glob("*.py") if path.name != "common.py")
SMALL = (
    "--hidden 64 --layers 2 --vocab 64 --batch 2 --sequence 16 --rounds 2 --warmup 1 --bucket-size 20000 --threads 1"
)


def run(script: str, *arguments: str) -> str:
    """What it prints; it must end well. On the CPU, whatever the machine has."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/bench" / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_says_how_it_is_run(script: str) -> None:
    assert "--json" in run(script, "--help")


def test_every_script_has_its_section() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for script in (*(f"tools/bench/{name}" for name in SCRIPTS), "tools/gpu_check.py"):
        assert f"`{script}`" in text, script


@pytest.fixture(scope="module", params=[2, 3])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    out = tmp_path_factory.mktemp("step") / "step.json"
    printed = run("step.py", "--ranks", str(request.param), *SMALL.split(), "--json", str(out))
    result = json.loads(out.read_text())
    assert result["settings"]["ranks"] == request.param
    return result, printed


@pytest.mark.slow
@pytest.mark.dist
def test_step(step: tuple[dict[str, Any], str]) -> None:
    result, printed = step
    assert result["benchmark"] == "step" and result["same_training"] is True
    assert result["settings"]["backend"] == "gloo" and result["settings"]["rounds"] == 2
    ranks, rows = result["settings"]["ranks"], {row["case"]: row for row in result["rows"]}
    names = {"ddp + fused adamw", "zero1", "zero1, both overlaps", "zero redundancy optimizer"}
    assert names <= set(rows) <= {*names, "deepspeed zero-1"}
    for name, row in rows.items():
        assert name in printed
        assert len(row["seconds_all"]) == len(row["drained_all"]) == 2
        for key in ("seconds", "drained", "ratio", "ratio_drained", "bytes_over_ddp"):
            assert math.isfinite(row[key]) and row[key] > 0, (name, key)
    assert rows["ddp + fused adamw"]["ratio"] == 1
    assert rows["ddp + fused adamw"]["optimizer_bytes"] == 8 * result["settings"]["params"]
    for name in ("zero1", "zero1, both overlaps"):
        row = rows[name]
        assert row["elements_sent"] == row["elements_expected"] == 2 * (ranks - 1) * row["padded_numel"] // ranks
        assert row["messages"] == 2 * (ranks - 1) * row["buckets"]
        assert row["optimizer_bytes"] == 8 * row["padded_numel"] // ranks
        assert row["optimizer_bytes"] - row["padding_bytes"] <= 8 * result["settings"]["params"]
    assert rows["zero1"]["buckets"] == 1 < rows["zero1, both overlaps"]["buckets"]


def test_step_refuses() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/bench/step.py"), "--rounds", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "at least" in done.stderr
