"""``torchrun -m zero1ckpt reshard``: ranks share the work, one commits, one speaks."""

import json
import os
import subprocess
import sys

import pytest
import torch

import zero1ckpt


@pytest.mark.dist
def test_torchrun_reshard_writes_what_one_process_writes(tmp_path):
    zero1ckpt.write(tmp_path / "a", {"w": {"fp32_param": torch.randn(1000)}}, dp_size=4, step=7)
    zero1ckpt.reshard(tmp_path / "a", tmp_path / "wanted", to_dp=7)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "zero1ckpt"]
    command = [sys.executable, *launch, "reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--to-dp", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["to_dp"] == 7  # one document, from one rank
    names = sorted(path.name for path in (tmp_path / "wanted").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "b" / n).read_bytes() == (tmp_path / "wanted" / n).read_bytes() for n in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "wanted"]
