"""The command as a process: what it imports, how it ends, what it does in a pipe and on a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from zero1ckpt.storage.staging import Staging

from .conftest import write_checkpoint


def command(*args):
    return [sys.executable, "-m", "zero1ckpt", *map(str, args)]


def start(*args, **options):
    environment = {**os.environ, **options.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(command(*args), env=environment, **options)


def finish(*args, **options):
    process = start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("verb", ["inspect", "inspect --json", "verify --deep", "reshard --to-dp 2", "clean", "--help"])
def test_torch_is_not_imported(ckpt, verb):
    name, *options = verb.split()
    args = [name, str(ckpt), *options] if name != "--help" else [name]
    code = f"import sys; from zero1ckpt.cli.main import run; assert run({args!r}) == 0 and 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_a_reader_that_goes_away_is_no_error(work):
    write_checkpoint(work / "wide", dp_size=1500)
    process = start("inspect", work / "wide", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert (process.wait(timeout=60), err) == (0, "")


def test_a_full_standard_output_is_an_error(ckpt):
    with open("/dev/full", "wb") as full:
        process = start("inspect", ckpt, stdout=full, stderr=subprocess.PIPE)
        err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 6 and err.count("\n") == 1 and "standard output" in err


def test_exit_code_and_line_of_a_process(ckpt):
    code, out, err = finish("inspect", ckpt / "nowhere", "--json")
    assert (code, out) == (3, "") and err.count("\n") == 1


def on_terminal(*args, env=()):
    """Runs a command with standard error on a pseudo-terminal; returns code, standard output, and what was shown."""
    ours, theirs = pty.openpty()
    process = start(*args, stdout=subprocess.PIPE, stderr=theirs, env={"TERM": "xterm-256color", **dict(env)})
    os.close(theirs)
    out = process.stdout.read().decode()
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(timeout=60), out, shown.decode()


def test_progress_is_shown_on_a_terminal_only_and_json_stays_one_document(ckpt, work):
    code, out, shown = on_terminal("reshard", ckpt, work / "a", "--to-dp", "3", "--json")
    assert code == 0 and json.loads(out)["to_dp"] == 3
    assert "reshard" in shown and "\x1b[" in shown
    code, out, shown = on_terminal("reshard", ckpt, work / "b", "--to-dp", "3", "--json", "--quiet")
    assert code == 0 and json.loads(out)["to_dp"] == 3 and shown == ""
    code, out, err = finish("reshard", ckpt, work / "c", "--to-dp", "3")
    assert code == 0 and err == ""


def test_colours_on_a_terminal(ckpt):
    ours, theirs = pty.openpty()
    process = start("inspect", ckpt, stdout=theirs, env={"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0 and b"\x1b[38;2;" in shown


SLOW = """
import sys, time
from zero1ckpt.cli import copying
from zero1ckpt.cli.main import main
def execute(plan, **options):
    from zero1ckpt.storage.staging import Staging, staged
    with staged(Staging(plan.dst, plan.job)):
        print("started", file=sys.stderr, flush=True)
        time.sleep(60)
copying.execute = execute
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_what_can_be_resumed(ckpt, work, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "reshard", str(ckpt), str(work / "out"), "--to-dp", "2"],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stderr.readline() == b"started\n"
    process.send_signal(number)
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 130
    assert err.count("\n") == 1 and "--resume" in err
    assert not (work / "out").exists()
    assert finish("reshard", ckpt, work / "out", "--to-dp", "2", "--resume")[0] == 0
    assert sorted(os.listdir(work)) == ["out", "step-7"]


def test_clean_removes_the_leftovers_of_a_killed_writer(ckpt, work):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "reshard", str(ckpt), str(work / "out"), "--to-dp", "2"],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stderr.readline() == b"started\n"
    code, out, _ = finish("clean", work / "out")
    assert code == 0 and "is at work on it" in out and (work / ".out.zero1ckpt-partial").is_dir()
    process.kill()
    process.wait()
    code, out, _ = finish("clean", work / ".out.zero1ckpt-partial")
    assert code == 0 and ".out.zero1ckpt-partial" in out and ".out.zero1ckpt-lock" in out
    assert sorted(os.listdir(work)) == ["step-7"]


def test_inspect_starts_with_little(ckpt):
    """It answers in about 0.2 s, half of which is numpy and the checksum library: nothing slow may join them."""
    slow = {"torch", "asyncio", "multiprocessing", "zarr", "tensorstore", "rich.progress", "rich.markdown", "pygments"}
    code = (
        "import sys; from zero1ckpt.cli.main import run; rc = run(sys.argv[1:])\n"
        f"print(sorted({slow!r} & sys.modules.keys()), file=sys.stderr); sys.exit(rc)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(ckpt)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stderr.decode().strip()) == (0, "[]")


def test_the_demo_runs_as_a_process_of_its_own(tmp_path):
    package = tmp_path / "fake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "demo.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    code = (
        "import sys; from zero1ckpt.cli import subprocesses as s; run = s.run_module\n"
        "s.run_module = lambda module, args, quiet: run('fake.demo', args, quiet=quiet)\n"
        "from zero1ckpt.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--ranks", "3", "--out", "x", "--json"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    assert done.returncode == 7 and done.stdout.decode().strip() == "['--out', 'x', '--ranks', '3', '--json']"


def test_staging_is_what_clean_looks_for(work):
    Staging(work / "a", {"command": "write"}).leave()
    assert finish("clean", work / "a", "--quiet") == (0, "", "")
    assert os.listdir(work) == []
