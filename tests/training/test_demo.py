"""The demo: its verdict, and one short run of all of it."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import zero1ckpt
from zero1ckpt.demo.curves import SHARE, compare, show, sparkline
from zero1ckpt.demo.text import CONTEXT, load_corpus

ROOT = Path(__file__).resolve().parents[2]


def test_batches_do_not_depend_on_the_number_of_ranks():
    corpus = load_corpus()
    whole, targets = corpus.batch(7, 12, 0, 1)
    for ranks in (2, 3, 4):
        shares = [corpus.batch(7, 12, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([inputs for inputs, _ in shares]), whole)
        assert torch.equal(torch.cat([follow for _, follow in shares]), targets)
    assert torch.equal(whole[:, 1:], targets[:, :-1])
    assert whole.shape == (12, CONTEXT) and len(corpus.tokens) > 100_000
    assert not torch.equal(corpus.batch(8, 12, 0, 1)[0], whole)


def test_verdict():
    losses = [4.0, 3.0, 2.0, 1.0]
    assert compare(losses, [2.0, 1.0 + 0.9 * SHARE], 2).holds
    assert not compare(losses, [2.0, 1.0 + 1.1 * SHARE], 2).holds
    assert not compare(losses, [2.0, math.nan], 2).holds
    with pytest.raises(ValueError, match="2 steps against 1"):
        compare(losses, [2.0], 2)


def test_text_of_the_verdict():
    console = Console(file=io.StringIO(), width=80)
    losses = [4.0 - 0.01 * i for i in range(80)]
    resumed = losses[40:]
    resumed[23] += 1.0
    show(console, compare(losses, resumed, 40), losses[:40], 4, 2)
    text = console.file.getvalue()
    assert "step 63, NOT within the bound of 0.00" in text
    curves = [line for line in text.splitlines() if line.startswith(("uninterrupted ", "resumed "))]
    assert len(curves) == 2 and max(map(len, curves)) <= 80
    assert curves[1].index("▃") > curves[0].index("█") + 15
    assert sparkline([0.0, 1.0, 2.0, -5.0], [0.0, 1.0]) == "▁██▁"
    assert sparkline([math.nan], [0.0, 1.0]) == "?"


def demo(*options):
    return subprocess.run(
        [sys.executable, "-m", "zero1ckpt", "demo", *map(str, options)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.dist
@pytest.mark.slow
def test_whole(work):
    done = demo("--ranks", 3, "--to-ranks", 2, "--steps", 4, "--out", work / "new" / "folder", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "zero1ckpt.demo/1" and told["ok"] is True
    assert (len(told["losses"]), told["first_resumed_step"], len(told["resumed_losses"])) == (8, 4, 4)
    assert told["losses"][0] > told["losses"][-1]
    assert told["max_difference"] <= min(told["bounds"])
    saved, moved = (zero1ckpt.open(path) for path in told["checkpoints"])
    assert saved.digest == moved.digest and saved.step == 4
    assert (saved.layout.rules.dp_size, moved.layout.rules.dp_size) == (3, 2)
    assert [line.split()[0] for line in told["commands"]] == ["torchrun", *["zero1ckpt"] * 3, "torchrun"]
    for command in ("inspect", "reshard", "verify"):
        assert f"$ zero1ckpt {command} " in done.stderr.replace("\n", " ")

    again = demo("--out", work / "new" / "folder")
    assert again.returncode == 6 and again.stdout == ""
    assert again.stderr.strip().count("\n") == 0 and "not empty" in again.stderr
