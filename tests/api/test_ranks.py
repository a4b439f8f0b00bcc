"""Several processes reshard together on a shared file system: one commit, the same bytes, and who is lost is named."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

import zero1ckpt
from tests.strategies import small_state, tree
from zero1ckpt.api import executing
from zero1ckpt.api.resharding import plan_reshard
from zero1ckpt.core.errors import LostRankError, OutputError, UsageError
from zero1ckpt.storage.rendezvous import Ranks, Rendezvous, rendezvous_path
from zero1ckpt.storage.staging import Staging, find_leftovers, partial_path, remove_leftover

CODE = """
import os, sys
import zero1ckpt
from zero1ckpt.api import executing
from zero1ckpt.api.resharding import execute, plan_reshard
from zero1ckpt.storage.rendezvous import Ranks
src, dst, dp, resume = sys.argv[1:]
ranks = Ranks.from_environment()
if os.environ.get("DIES") == str(ranks.rank):
    executing._copy_share = lambda *args: os._exit(9)
if os.environ.get("FAILS") == str(ranks.rank):
    def fail(*args):
        raise zero1ckpt.Zero1CkptError("no luck")
    executing._copy_share = fail
try:
    plan = plan_reshard(src, dst, to_dp=int(dp), bucket_size=100)
    execute(plan, ranks=ranks, rank_timeout=3.0, resume=resume == "1")
except zero1ckpt.Zero1CkptError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def run(src, dst, *, size=3, resume=False, names=("RANK", "WORLD_SIZE"), dps=None, **environment):
    """Exit code and error line of each rank."""
    base = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(src), str(dst), str((dps or [5] * size)[rank]), str(int(resume))],
            env={**base, **environment, names[0]: str(rank), names[1]: str(size)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outcomes = [process.communicate(timeout=60)[1].strip() for process in processes]
    return [process.returncode for process in processes], outcomes


@pytest.fixture
def src(tmp_path):
    zero1ckpt.write(tmp_path / "src", small_state(5), dp_size=4, bucket_size=300, extra={"x": 1})
    zero1ckpt.reshard(tmp_path / "src", tmp_path / "wanted", to_dp=5, bucket_size=100)
    return tmp_path / "src"


@pytest.mark.dist
@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")], ids=["torchrun", "srun"])
def test_ranks_write_what_one_process_writes(src, tmp_path, names):
    codes, lines = run(src, tmp_path / "out", names=names)
    assert codes == [0, 0, 0], lines
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    assert not find_leftovers(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named_nothing_is_committed_and_a_resume_ends_it(src, tmp_path, dead):
    codes, lines = run(src, tmp_path / "out", DIES=str(dead))
    assert codes[dead] == 9 and all(code == 130 for rank, code in enumerate(codes) if rank != dead)
    living = [line for rank, line in enumerate(lines) if rank != dead]
    assert all(f"rank {dead}" in line and len(line.splitlines()) == 1 for line in living), lines
    assert not (tmp_path / "out").exists()
    codes, lines = run(src, tmp_path / "out", resume=True)
    assert codes == [0, 0, 0], lines
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    assert not find_leftovers(tmp_path)


@pytest.mark.dist
def test_one_ranks_error_reaches_all_and_leftovers_can_be_cleaned(src, tmp_path):
    codes, lines = run(src, tmp_path / "out", FAILS="2")
    assert codes == [130, 130, 1] and "no luck" in lines[0] and "rank 2" in lines[0]
    for leftover in find_leftovers(tmp_path):
        remove_leftover(leftover)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src", "wanted"]


@pytest.mark.dist
def test_ranks_with_other_commands_do_not_mix(src, tmp_path):
    codes, lines = run(src, tmp_path / "out", dps=[5, 6, 5])
    assert all(codes) and any("another command" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_a_job_whose_other_ranks_do_not_come_leaves_nothing(tmp_path):
    threads = threading.active_count()
    with pytest.raises(LostRankError, match="from rank 1 of 2"), Rendezvous(tmp_path / "out", Ranks(0, 2), timeout=0.2):
        pass
    with pytest.raises(LostRankError, match="rank 0"), Rendezvous(tmp_path / "out", Ranks(1, 2), timeout=0.2):
        pass
    assert not list(tmp_path.iterdir()) and threading.active_count() == threads


def test_a_second_job_does_not_disturb_the_ranks_of_a_live_one(tmp_path):
    staging = Staging(tmp_path / "out", {"command": "test"})
    meeting = rendezvous_path(tmp_path / "out")
    meeting.mkdir()
    (meeting / "go").write_text("{}")
    with pytest.raises(OutputError, match="another writer"), Rendezvous(tmp_path / "out", Ranks(0, 2), timeout=0.2):
        pass
    assert [path.name for path in meeting.iterdir()] == ["go"]
    staging.abandon()


def meet(dst, size=2, timeout=5.0):
    """One session's views, rank 0 first; each enters in a thread of its own, as processes do."""
    views = [Rendezvous(dst, Ranks(rank, size), timeout=timeout) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(Rendezvous.__enter__, views))


def test_ranks_of_a_dead_run_tell_the_next_one_nothing(tmp_path):
    """Rank 0 of the first job dies (its folder stays, its lock is free); its rank 1 goes on, and comes too late."""
    dead, orphan = meet(tmp_path / "out")
    dead._end_beating()
    leader, follower = meet(tmp_path / "out")
    with pytest.raises(LostRankError, match="another job"):
        orphan.post("report-1", b"of the dead")
    with pytest.raises(LostRankError, match="another job"):
        orphan.receive("start")
    orphan.__exit__(LostRankError, LostRankError("too late"), None)
    follower.post("report-1", b"of the living")
    assert list(leader.collect("report")) == [b"of the living"]
    follower.__exit__(None, None, None)
    leader.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())


def test_an_orphans_blobs_do_not_reach_the_next_job(src, tmp_path, monkeypatch):
    """The same with a reshard: the orphan still copies for another bucket size when the next job begins."""
    plans = [plan_reshard(src, tmp_path / "out", to_dp=5, bucket_size=size) for size in (300, 100)]
    dead, orphan = meet(tmp_path / "out")
    left = Staging(plans[0].dst, plans[0].job)
    dead.post("start", msgspec.json.encode(executing._Start(plans[0].job, left.root.name, False)))
    dead._end_beating()
    left.leave()
    copy = executing._copy_share

    def copy_late(*args):
        shutil.rmtree(rendezvous_path(tmp_path / "out"))
        Staging(plans[1].dst, plans[1].job).leave()
        return copy(*args)

    monkeypatch.setattr(executing, "_copy_share", copy_late)
    with pytest.raises(LostRankError, match="another job"):
        executing._follow(plans[0], orphan)
    orphan._end_beating()
    (area,) = partial_path(tmp_path / "out").iterdir()
    assert not list(area.iterdir())


@pytest.mark.parametrize("rank, size", [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0")])
def test_an_environment_that_makes_no_sense_is_refused(rank, size):
    with pytest.raises(UsageError, match=f"RANK={rank}"):
        Ranks.from_environment({"RANK": rank, "WORLD_SIZE": size})
    assert Ranks.from_environment({}) == Ranks(0, 1)
