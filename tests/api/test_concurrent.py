"""Two writers of one place: one wins, the other fails fast with exit code 6."""

import multiprocessing
import os
import shutil
import threading
import time

import zero1ckpt
from tests.faults import in_child
from tests.strategies import small_state, tree
from zero1ckpt.api import verify


class Slow:
    """Keeps a reshard at work for as long as it is not released."""

    def __init__(self):
        self.started, self.release = threading.Event(), threading.Event()

    def advance(self, nbytes):
        self.started.set()
        assert self.release.wait(60)


def test_second_reshard_exits_6_while_the_first_is_at_work(work):
    zero1ckpt.write(work / "src", small_state(1), dp_size=3)
    slow = Slow()
    first = threading.Thread(
        target=zero1ckpt.reshard, args=(work / "src", work / "dst"), kwargs={"to_dp": 2, "workers": 1, "progress": slow}
    )
    first.start()
    assert slow.started.wait(60)
    before = time.monotonic()
    jobs = [{}, {"resume": True}, {"overwrite": True}, {"to_dp": 4}]
    codes = [
        in_child(lambda job=job: zero1ckpt.reshard(work / "src", work / "dst", **({"to_dp": 2, "workers": 1} | job)))
        for job in jobs
    ]
    assert codes == [6] * len(jobs) and time.monotonic() - before < 30
    slow.release.set()
    first.join()
    assert verify(work / "dst", deep=True, against=work / "src").ok
    assert sorted(p.name for p in work.iterdir()) == ["dst", "src"]


def test_many_at_once_make_one(work):
    zero1ckpt.write(work / "src", small_state(1), dp_size=3)
    zero1ckpt.reshard(work / "src", work / "whole", to_dp=2)
    for _ in range(6):
        gate = multiprocessing.get_context("fork").Event()
        pids = []
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                code = 99
                try:
                    gate.wait()
                    zero1ckpt.reshard(work / "src", work / "new" / "dst", to_dp=2, workers=1)
                    code = 0
                except zero1ckpt.Zero1CkptError as error:
                    code = error.exit_code
                finally:
                    os._exit(code)
            pids.append(pid)
        gate.set()
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        assert codes == [0, 6, 6, 6, 6]
        assert tree(work / "new" / "dst") == tree(work / "whole")
        assert [p.name for p in (work / "new").iterdir()] == ["dst"]

        shutil.rmtree(work / "new")


def test_overwriters_at_once_leave_a_whole_one(work):
    zero1ckpt.write(work / "src", small_state(1), dp_size=3)
    trees = {}
    for dp in (2, 4, 5):
        zero1ckpt.reshard(work / "src", work / f"whole{dp}", to_dp=dp)
        trees[dp] = tree(work / f"whole{dp}")
    zero1ckpt.reshard(work / "src", work / "dst", to_dp=2)

    def loop(dp):
        for _ in range(10):
            try:
                zero1ckpt.reshard(work / "src", work / "dst", to_dp=dp, workers=1, overwrite=True)
            except zero1ckpt.Zero1CkptError as error:
                if error.exit_code != 6:
                    raise

    pids = []
    for dp in trees:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                loop(dp)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0, 0]
    assert tree(work / "dst") in trees.values()
    assert not [p.name for p in work.iterdir() if p.name.startswith(".")]
