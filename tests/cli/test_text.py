"""What people see: at any width, in any terminal, whatever the names in the file are."""

import io
import re
import sys
from xml.etree import ElementTree

import pytest
import torch

import zero1ckpt
from zero1ckpt.api.stored import describe
from zero1ckpt.cli import text
from zero1ckpt.cli.bars import bars_of
from zero1ckpt.cli.main import run
from zero1ckpt.cli.narrowing import Narrowing, select

from .conftest import write_checkpoint

HOSTILE = {"[red]\x1b[2J": (3,), "a\nb[/bold]": (5,), "<script>alert(1)</script>": (4,), "\u202egnp.exe": (2,)}


@pytest.fixture
def hostile(work):
    state = {name: {"fp32_param": torch.zeros(shape)} for name, shape in HOSTILE.items()}
    zero1ckpt.write(work / "hostile", state, dp_size=2, groups=[{"[bold]\x1b]0;x\x07": "\x1b[31m"}])
    return work / "hostile"


@pytest.mark.parametrize("width", [60, 80, 133, 200])
def test_inspect_fits_the_width(cli, ckpt, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for args in ([], ["--rank", "1"], ["--param", "wte.weight"], ["--bucket", "0"], ["--group", "1"]):
        out = cli("inspect", ckpt, *args).out
        assert max(map(len, out.splitlines())) <= width
        assert "\x1b" not in out


def test_inspect_tells_everything(cli, ckpt):
    out = cli("inspect", ckpt).out
    for title in ("Groups", "Params", "Buckets", "Ranks", "Files", "Which rank owns which params"):
        assert f"\n{title}\n" in out
    for words in (
        "wte.weight",
        "40x8",
        "weight_decay 0.1",
        "300 elements",
        "padding",
        "rank-00003-of-00004.safetensors",
    ):
        assert words in out


def test_the_bar_is_to_scale(ckpt):
    ((_, selection),) = select(describe(ckpt).catalogs, Narrowing()).items()
    for bar in bars_of(selection):
        cells = bar.cells(bar.numel)  # one element a cell
        for i, span in enumerate(bar.spans):
            assert cells[span.start : span.end] == [i] * (span.end - span.start)
            assert not span.empty or span.name == "blocks.0.empty"
            if not span.empty:
                shard = bar.numel // bar.dp_size
                assert (span.first_rank, span.last_rank) == (span.start // shard, (span.end - 1) // shard)
        assert cells.count(-1) == bar.padding


def test_many_ranks_are_summarised(cli, work):
    write_checkpoint(work / "wide", dp_size=3000, bucket_size=None)
    out = cli("inspect", work / "wide").out
    assert out.count("\n") < 120
    assert "first 6 and last 2 of 3,000" in out and "2999" in out


def test_hostile_names_reach_nobody(cli, hostile, work):
    page, picture = work / "a.html", work / "a.svg"
    for args in (["inspect", hostile, "--html", page, "--svg", picture], ["verify", hostile], ["inspect", hostile]):
        out = cli(*args).out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", out)
    assert "[red]\\x1b[2J" in out and "a\\nb[/bold]" in out and "[bold]" in out
    err = cli("inspect", hostile, "--param", "[red]\x1b[2").err
    assert "\x1b" not in err
    html = page.read_text()
    assert "<script>" not in html and "&lt;script&gt;" in html and "\x1b" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html + picture.read_text())
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_drawings_hold_every_param_and_bucket(cli, ckpt, work):
    assert cli("inspect", ckpt, "--quiet", "--html", work / "a.html", "--svg", work / "a.svg").out == ""
    html, svg = (work / "a.html").read_text(), (work / "a.svg").read_text()
    document = cli("inspect", ckpt, "--json").document
    for param in document["params"]:
        assert param["name"] in html
        assert param["name"] in svg or not param["numel"]
    for i, buffer in enumerate(document["buffers"]):
        for bucket in buffer["buckets"]:
            assert f"bucket {i}.{bucket['index']}<" in svg and f"bucket {i}.{bucket['index']}<" in html


@pytest.mark.parametrize(("encoding", "plain"), [("ascii", ""), ("utf-8", "1")])
def test_without_unicode_or_colour_everything_is_ascii(ckpt, monkeypatch, encoding, plain):
    monkeypatch.setenv("NO_COLOR", plain)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    for args in (["inspect"], ["verify", "--deep"], ["reshard", "--to-dp", "2", "--dry-run"]):
        assert run([args[0], str(ckpt), *args[1:]]) == 0
    assert out.buffer.getvalue().isascii()


def test_quiet_prints_nothing(cli, ckpt, work):
    for args in (["inspect", ckpt], ["verify", ckpt], ["reshard", ckpt, work / "o", "--to-dp", "2"], ["clean", work]):
        assert cli(*args, "--quiet").out == ""


def test_clean_says_what_it_does(cli, work):
    assert "nothing to remove" in cli("clean", work / "never-made").out
    assert cli("clean", work / "no" / "such").code == 3


def test_a_resume_of_what_is_complete_says_so(cli, ckpt, work):
    args = ("reshard", ckpt, work / "out", "--to-dp", "2", "--resume")
    assert "nothing" not in cli(*args).out
    assert "nothing: it was complete already" in cli(*args).out


def test_the_current_folder_by_its_name(cli, ckpt, monkeypatch):
    monkeypatch.chdir(ckpt)
    assert str(ckpt) in cli("inspect").out
    assert cli("reshard", "--to-dp", "2").code == 0
    assert (ckpt.parent / "step-7-dp2" / "manifest.json").is_file()


def test_a_run_folder_means_its_latest(cli, ckpt):
    (ckpt.parent / "latest").write_text("step-7\n")
    assert cli("inspect", ckpt.parent, "--json").document["path"] == str(ckpt)


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["reshard", "--help"], ["--version"]])
def test_help(cli, args):
    assert cli(*args).out


@pytest.mark.parametrize(
    ("given", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1234567, "1.23 MB"), (999_600, "1 MB"), (123_456, "123 KB")],
)
def test_short_bytes(given, expected):
    assert text.short_bytes(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("5", 5), ("2 KB", 2000), ("1.5KiB", 1536), ("3mb", 3_000_000), ("1GiB", 2**30), ("7B", 7), ("0.5 GB", 5 * 10**8)],
)
def test_sizes(given, expected):
    from zero1ckpt.cli.options import SIZE

    assert SIZE.convert(given, None, None) == expected
