"""README.md is true: its links lead somewhere, and every command and example in it runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def lines(kind: str) -> list[str]:
    return [line for block, body in BLOCKS if block == kind for line in body.splitlines()]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell where ``zero1ckpt`` is this checkout's command."""
    command = tmp_path / "bin" / "zero1ckpt"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zero1ckpt "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_blocks_are_of_known_kinds() -> None:
    assert [kind for kind, _ in BLOCKS] == ["setup", "setup", "python", "python", "shell", "python"]


def test_set_up_commands_are_scripts_that_are_there() -> None:
    assert lines("setup") == ["bash tools/quickstart.sh", "bash tools/test.sh"]
    for command in lines("setup"):
        script = ROOT / command.removeprefix("bash ")
        assert script.is_file()
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_all_other_blocks_run_one_after_the_other(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    names: dict[str, Any] = {}
    for kind, body in BLOCKS:
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(body, "README.md", "exec"), names)
        elif kind == "shell":
            for command in body.splitlines():
                done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                assert done.stdout
    assert names["extra"]["scheduler"]["last_epoch"] == 3


def test_commands_and_exit_codes_are_those_of_the_package() -> None:
    from zero1ckpt.core import errors

    stated = dict(re.findall(r"(\d) (\w+)", TEXT.partition("Exit codes: ")[2].partition(". ")[0]))
    own = {str(kind.exit_code) for kind in vars(errors).values() if isinstance(kind, type)}
    assert set(stated) == {*own & set("123456"), "0"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_paths_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:zero1ckpt|tools|tests|formats|requirements)/[\w./]*)`", text):
        assert (ROOT / path).exists() or "foreign" in path, path
    for path in re.findall(r"tools/\w+\.(?:sh|py)", text):
        assert (ROOT / path).is_file(), path


def test_formats_are_those_of_the_package() -> None:
    from zero1ckpt.registry import DEFAULT_FORMAT, FORMATS

    rows = re.findall(r"^\| `(\w+)`( \(default\))? \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    assert {name: bool(mark) for name, mark, _ in rows} == {name: name == DEFAULT_FORMAT for name, _ in FORMATS}
    for name, _, containers in rows:
        stated = re.findall(r"`(\w+)`", containers)
        assert stated == [container for own, container in FORMATS if own == name and container in stated]


def test_contributing_names_the_members_of_the_protocol() -> None:
    from zero1ckpt.model.protocols import Format

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    members = [name for name in vars(Format) if not name.startswith("_")]
    assert members and all(f"`{name}`" in text for name in members), members
