"""System calls that fail, are recorded, or kill the process, at a chosen moment."""

import contextlib
import io
import os
import signal
import threading
import time

from zero1ckpt.storage import staging

CALLS = ("open", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir", "posix_fallocate", "ftruncate", "close")


@contextlib.contextmanager
def calls(before):
    """Calls ``before(name, args)`` before every system call that changes files; it may raise, or not return."""
    saved = {name: getattr(os, name) for name in CALLS}
    exchange, io_open = staging._exchange, io.open
    lock = threading.RLock()

    def hook(name, real):
        def call(*args, **keywords):
            with lock:
                before(name, args)
            return real(*args, **keywords)

        return call

    for name, real in saved.items():
        setattr(os, name, hook(name, real))
    staging._exchange = hook("exchange", exchange)
    io.open = hook("open", io_open)
    try:
        yield
    finally:
        for name, real in saved.items():
            setattr(os, name, real)
        staging._exchange, io.open = exchange, io_open


def count_calls(work):
    names = []
    with calls(lambda name, args: names.append(name)):
        work()
    return names


def in_child(work, *, kill_after=None):
    """Runs ``work`` in a forked process and returns its exit status; minus the signal's number if one killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work()
            code = 0
        except BaseException as error:
            code = getattr(error, "exit_code", 99)
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def killed_at(moment, work):
    """Runs ``work`` in a child that is killed, as by ``kill -9``, before its ``moment``-th call; whether it was."""

    def run():
        left = moment

        def before(name, args):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            left -= 1

        with calls(before):
            work()

    code = in_child(run)
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0
