"""Every failure: its exit code, and one line that names the place, what was found, and what to do."""

import errno
import os
import shutil

import pytest

from zero1ckpt.cli import copying
from zero1ckpt.storage.staging import Staging

from .conftest import flip, write_checkpoint

RANK_1 = "rank-00001-of-00004.safetensors"


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["reshard", "--to-dp", "2"]])
def test_nothing_there(cli, work, command):
    result = cli(command[0], work / "nowhere", *command[1:])
    assert result.code == 3 and str(work / "nowhere") in result.err
    assert result.out == ""


def test_a_folder_without_a_manifest_is_no_checkpoint(cli, work, ckpt):
    (ckpt / "manifest.json").unlink()
    result = cli("inspect", ckpt)
    assert result.code == 3 and "no committed checkpoint" in result.err


def test_a_half_made_checkpoint_is_named_as_one(cli, work, ckpt):
    Staging(work / "new", {"command": "write"}).leave()
    result = cli("inspect", work / "new")
    assert result.code == 3 and "clean" in result.err and "--resume" in result.err


def test_a_file_is_no_checkpoint(cli, ckpt):
    assert cli("inspect", ckpt / "manifest.json").code == 3


@pytest.mark.parametrize("command", [["inspect"], ["reshard", "--to-dp", "2"]])
def test_truncated(cli, ckpt, command):
    os.truncate(ckpt / RANK_1, 1000)
    result = cli(command[0], ckpt, *command[1:])
    assert result.code == 4 and RANK_1 in result.err and "1000 bytes" in result.err
    assert not (ckpt.parent / "step-7-dp2").exists()


@pytest.mark.parametrize("command", [["inspect"], ["reshard", "--to-dp", "2"]])
def test_a_missing_file(cli, ckpt, command):
    (ckpt / RANK_1).unlink()
    result = cli(command[0], ckpt, *command[1:])
    assert result.code == 3 and RANK_1 in result.err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["reshard", "--to-dp", "2"]])
def test_an_altered_manifest(cli, ckpt, command):
    flip(ckpt / "manifest.json", 40)
    result = cli(command[0], ckpt, *command[1:], "--json")
    assert result.code == 4 and "manifest" in result.err
    assert result.out == ""


def test_altered_data_is_refused_by_reshard_and_leaves_nothing(cli, ckpt):
    flip(ckpt / RANK_1, -1500)
    result = cli("reshard", ckpt, "--to-dp", "3")
    assert result.code == 4 and RANK_1 in result.err
    assert sorted(os.listdir(ckpt.parent)) == ["step-7"]


def test_altered_data_is_found_by_a_deep_verify(cli, ckpt):
    flip(ckpt / RANK_1, -1500)
    result = cli("verify", ckpt, "--deep")
    assert result.code == 1 and RANK_1 in result.err


def test_swapped_rank_files(cli, ckpt):
    other = ckpt / "rank-00002-of-00004.safetensors"
    os.rename(ckpt / RANK_1, ckpt / "aside")
    os.rename(other, ckpt / RANK_1)
    os.rename(ckpt / "aside", other)
    assert cli("verify", ckpt).code == 1
    assert cli("reshard", ckpt, "--to-dp", "2").code == 4


def test_a_file_from_another_save(cli, ckpt, work):
    write_checkpoint(work / "other", seed=1)
    shutil.copyfile(work / "other" / RANK_1, ckpt / RANK_1)
    result = cli("verify", ckpt)
    assert result.code == 1 and RANK_1 in result.err


def test_a_wrong_from_dp(cli, ckpt):
    result = cli("reshard", ckpt, "--from-dp", "8", "--to-dp", "2")
    assert result.code == 5 and "--from-dp" in result.err and "4" in result.err


def test_an_existing_destination(cli, ckpt, work):
    assert cli("reshard", ckpt, work / "out", "--to-dp", "2").code == 0
    before = (work / "out" / "manifest.json").read_bytes()
    assert cli("reshard", ckpt, work / "out", "--to-dp", "3").code == 6
    assert cli("reshard", ckpt, work / "out", "--to-dp", "3", "--dry-run").code == 6
    assert (work / "out" / "manifest.json").read_bytes() == before
    assert cli("reshard", ckpt, work / "out", "--to-dp", "3", "--overwrite").code == 0
    assert cli("inspect", work / "out", "--json").document["dp_size"] == 3


def test_a_foreign_folder_is_not_overwritten(cli, ckpt, work):
    (work / "mine").mkdir()
    (work / "mine" / "thesis.txt").write_text("years")
    assert cli("reshard", ckpt, work / "mine", "--to-dp", "2", "--overwrite").code == 6
    assert (work / "mine" / "thesis.txt").read_text() == "years"


def test_a_parent_that_is_a_file(cli, ckpt, work):
    (work / "file").write_text("")
    result = cli("reshard", ckpt, work / "file" / "out", "--to-dp", "2")
    assert result.code == 6 and str(work / "file") in result.err


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(cli, ckpt, work, monkeypatch, code):
    """What the system answers there; root, who may run the tests, is refused by no permission."""
    real = os.open

    def refuse(path, flags, *args, **keywords):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    result = cli("reshard", ckpt, work / "new" / "out", "--to-dp", "2")
    assert result.code == 6 and os.strerror(code) in result.err and str(work / "new") in result.err
    assert sorted(os.listdir(work)) == ["step-7"]


@pytest.mark.parametrize("dst", [".", "inside", ".."])
def test_source_and_destination_are_the_same(cli, ckpt, dst):
    result = cli("reshard", ckpt, ckpt / dst, "--to-dp", "2")
    assert result.code == 2 and "same" in result.err


def test_an_unknown_format(cli, ckpt, work):
    for command in (
        ["reshard", ckpt, work / "out", "--to-dp", "2", "--format"],
        ["convert", ckpt, work / "out", "--to"],
    ):
        result = cli(*command, "buckt_shards")
        assert result.code == 5 and "did you mean bucket_shards?" in result.err


def test_an_unknown_container(cli, ckpt, work):
    result = cli("reshard", ckpt, work / "out", "--to-dp", "2", "--container", "tar")
    assert result.code == 5 and "tar" in result.err


@pytest.mark.parametrize(
    "args",
    [
        ["inspekt"],
        ["inspect", "--foo"],
        ["reshard"],
        ["reshard", ".", "--to-dp", "0"],
        ["reshard", ".", "--to-dp", "two"],
        ["reshard", ".", "--to-dp", "2", "--memory-limit", "1 XB"],
        ["reshard", ".", "--to-dp", "2", "--memory-limit", "-3MB"],
        ["reshard", ".", "--to-dp", "2", "--bucket-size", "0"],
        ["reshard", ".", "--to-dp", "2", "--bucket-size", "some"],
        ["reshard", ".", "--to-dp", "2", "--workers", "0"],
        ["reshard", "a", "b", "c", "--to-dp", "2"],
        ["inspect", "--bucket", "x"],
        ["inspect", "--rank", "-1"],
        ["verify"],
        ["convert", "a", "b"],
        ["--nope"],
    ],
)
def test_usage(cli, args):
    result = cli(*args)
    assert result.code == 2 and "--help" in result.err
    assert result.out == ""


def test_a_near_command_is_suggested(cli):
    assert "did you mean inspect?" in cli("inspekt").err


def test_too_little_memory(cli, ckpt):
    result = cli("reshard", ckpt, "--to-dp", "2", "--memory-limit", "10KB")
    assert result.code == 2 and "--memory-limit" in result.err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--rank", "4"], "0 to 3"),
        (["--group", "2"], "0 to 1"),
        (["--bucket", "99"], "0 to"),
        (["--bucket", "9.0"], "0 to 1"),
        (["--param", "blocks.0.mlp.wieght"], "blocks.0.mlp.weight"),
        (["--param", "wte.weight", "--group", "1"], "--param wte.weight --group 1"),
    ],
)
def test_a_narrowing_that_matches_nothing(cli, ckpt, args, expected):
    result = cli("inspect", ckpt, *args)
    assert result.code == 2 and expected in result.err


def test_an_interrupt_says_how_to_go_on(cli, ckpt, work, monkeypatch):
    def interrupt(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "execute", interrupt)
    result = cli("reshard", ckpt, work / "out", "--to-dp", "2")
    assert result.code == 130 and "--resume" in result.err and "zero1ckpt clean" in result.err


def test_our_own_mistake_is_one_line_and_no_answer(cli, ckpt, monkeypatch):
    def fail(*args, **keywords):
        raise RuntimeError("first\nsecond \x1b[2J")

    monkeypatch.setattr(copying, "execute", fail)
    result = cli("reshard", ckpt, "--to-dp", "2")
    assert result.code == 70 and "internal error: RuntimeError: first second \\x1b[2J" in result.err


def test_a_traceback_only_where_it_is_asked_for(ckpt, capsys, monkeypatch):
    from zero1ckpt.cli.main import run

    monkeypatch.setenv("ZERO1CKPT_DEBUG", "1")
    assert run(["inspect", str(ckpt / "nowhere")]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err and err.rstrip().splitlines()[-1].startswith("zero1ckpt: ")


def test_a_drawing_does_not_replace_a_file_of_the_checkpoint(cli, ckpt):
    before = (ckpt / "manifest.json").read_bytes()
    assert cli("inspect", ckpt, "--html", ckpt / "manifest.json").code == 6
    assert (ckpt / "manifest.json").read_bytes() == before
    assert cli("inspect", ckpt, "--svg", ckpt / "nowhere" / "a.svg").code == 6
