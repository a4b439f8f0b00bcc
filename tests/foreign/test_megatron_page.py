"""docs/megatron.md is true: every command in it runs, on real checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a line in a folder where ``zero1ckpt`` is this checkout's command."""
    command = tmp_path / "bin" / "zero1ckpt"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zero1ckpt "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def start(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return start


def test_every_command_runs(
    run: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, corpus: Callable[..., Path]
) -> None:
    toy, gpt = corpus("v0161_toy_dp2_b2500"), corpus("v0140_gpt_tp2_dp2_b1")
    shutil.copytree(toy / "dp_reshardable", tmp_path / "run")
    shutil.copytree(toy / "fully_reshardable", tmp_path / "damaged")
    shutil.copytree(toy / "legacy_torch", tmp_path / "legacy")
    shutil.copytree(gpt / "fully_sharded_model_space", tmp_path / "old")
    for kind, body in BLOCKS:
        if kind not in ("shell", "damaged"):
            continue
        for line in body.splitlines():
            done = run(line)
            expected = 1 if line == "zero1ckpt doctor damaged" else 0
            assert done.returncode == expected, f"{line}\n{done.stdout}{done.stderr}"
            assert done.stdout, line


def test_blocks_are_of_known_kinds() -> None:
    assert {kind for kind, _ in BLOCKS} == {"shell", "damaged", "training"}


def test_the_three_lines_are_those_of_the_module() -> None:
    from zero1ckpt.foreign.megatron import layout_file

    (body,) = (body for kind, body in BLOCKS if kind == "training")
    assert layout_file.__doc__ is not None
    assert all(line.strip() in layout_file.__doc__ for line in body.splitlines())
