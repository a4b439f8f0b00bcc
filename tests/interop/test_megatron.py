"""Unmodified megatron-core loads what is written here, and what it writes is read here: bit for bit, both ways.

megatron-core comes from the package index into a folder of its own, beside the torch that the tests run with; or from
the folder that ZERO1CKPT_MEGATRON names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zero1ckpt

pytestmark = [pytest.mark.slow, pytest.mark.dist]

_HERE = Path(__file__).resolve().parent
_PACKAGES = ("megatron-core==0.16.1", "psutil")
_TIMEOUT = 180
FIELDS = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

Driver = Callable[..., None]


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with megatron-core. Skips where the index cannot be reached."""
    named = os.environ.get("ZERO1CKPT_MEGATRON")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("megatron")
    options = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "20", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, *_PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        failed = done.stderr[-300:] if done.returncode else None
    except subprocess.TimeoutExpired as error:
        failed = str(error)
    if failed is not None:
        pytest.skip(f"megatron-core could not be installed, so nothing was tried with it: {failed}")
    return folder


@pytest.fixture(scope="session")
def drive(megatron: Path) -> Driver:
    """Runs the driver in a process of its own; fails with what it printed."""

    def run(*arguments: object) -> None:
        path = os.pathsep.join((str(_HERE.parents[1]), str(megatron)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, str(_HERE / "driver.py"), *(str(argument) for argument in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, env=environment)
        assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

    return run


class Saved:
    """Checkpoints of one model as Megatron saves them, made when they are first asked for."""

    def __init__(self, root: Path, drive: Driver) -> None:
        self.root, self.drive = root, drive

    def get(self, model: str, format: str, dp: int = 2, bucket: int | None = None) -> Path:
        folder = self.root / f"{model}-{format}-{dp}-{bucket}"
        if not folder.exists():
            self.drive("save", folder, model, format, dp, *(() if bucket is None else (bucket,)))
        return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, drive: Driver) -> Iterator[Saved]:
    yield Saved(tmp_path_factory.mktemp("saved"), drive)


def _load(drive: Driver, made: Path, source: Path, model: str, dp: int, bucket: int | None = None) -> None:
    """Megatron loads ``made`` into a model that begins with other values, and compares with the truth of ``source``."""
    drive("load", made, source / "truth.pt", model, dp, *(() if bucket is None else (bucket,)))


@pytest.mark.parametrize(
    ("model", "bucket", "dp", "new_bucket"),
    [("toy", 2500, 3, 1500), ("gpt_tp2", None, 3, 3000), ("gpt_pp2", None, 3, 2000), ("moe_ep2", None, 4, None)],
)
def test_dp_reshardable_is_loaded_at_another_dp_and_bucket_size(
    tmp_path: Path, saved: Saved, drive: Driver, model: str, bucket: int | None, dp: int, new_bucket: int | None
) -> None:
    source = saved.get(model, "dp_reshardable", bucket=bucket)
    made = tmp_path / "made"
    size = "none" if new_bucket is None else new_bucket
    zero1ckpt.reshard(source, made, to_dp=dp, bucket_size=size, format="megatron:dp_reshardable")
    _load(drive, made, source, model, dp, new_bucket)


@pytest.mark.parametrize("model", ["toy", "gpt_tp2", "gpt_pp2", "moe_ep2"])
def test_buckets_become_fully_reshardable_and_buckets_again(
    tmp_path: Path, saved: Saved, drive: Driver, model: str
) -> None:
    source = saved.get(model, "dp_reshardable", bucket=2500 if model == "toy" else None)
    whole, again = tmp_path / "whole", tmp_path / "again"
    zero1ckpt.reshard(source, whole, format="megatron:fully_reshardable")
    _load(drive, whole, source, model, 4, 1000)
    zero1ckpt.reshard(
        whole,
        again,
        format="megatron:dp_reshardable",
        to_dp=4,
        bucket_size="none",
        layout=source / "layout.json",
    )
    _load(drive, again, source, model, 4)


@pytest.mark.parametrize("model", ["toy", "gpt_tp2", "gpt_pp2", "moe_ep2"])
def test_legacy_is_loaded_at_another_dp_and_bucket_size(
    tmp_path: Path, saved: Saved, drive: Driver, model: str
) -> None:
    source = saved.get(model, "legacy", bucket=2500)
    zero1ckpt.reshard(source, tmp_path / "made", bucket_size=1500, format="megatron:legacy")
    _load(drive, tmp_path / "made", source, model, 4, 1500)


@pytest.mark.parametrize(
    ("model", "format"),
    [
        ("toy", "dp_reshardable"),
        ("gpt_pp2", "dp_reshardable"),
        ("swiglu_tp2", "fully_reshardable"),
        ("gpt_pp2", "fully_reshardable"),
        ("moe_ep2", "fully_reshardable"),
    ],
)
def test_legacy_becomes_what_is_written_today(
    tmp_path: Path, saved: Saved, drive: Driver, model: str, format: str
) -> None:
    source = saved.get(model, "legacy", bucket=2500)
    zero1ckpt.reshard(source, tmp_path / "made", to_dp=2, bucket_size=1500, format=f"megatron:{format}")
    _load(drive, tmp_path / "made", source, model, 2 if format == "dp_reshardable" else 4, 1500)


@pytest.mark.parametrize("model", ["toy", "gpt_pp2"])
def test_native_and_back(tmp_path: Path, saved: Saved, drive: Driver, model: str) -> None:
    source = saved.get(model, "dp_reshardable", bucket=2500 if model == "toy" else None)
    zero1ckpt.reshard(source, tmp_path / "native", format="bucket_shards")
    zero1ckpt.reshard(tmp_path / "native", tmp_path / "native-4", to_dp=4)
    zero1ckpt.reshard(tmp_path / "native-4", tmp_path / "made", format="megatron:dp_reshardable")
    _load(drive, tmp_path / "made", source, model, 4, 2500 if model == "toy" else None)


@pytest.mark.parametrize("format", ["dp_reshardable", "fully_reshardable", "legacy"])
def test_what_megatron_saves_is_read(saved: Saved, format: str) -> None:
    """A model in one piece: every param's state, from the file and from Megatron's memory."""
    bucket = 2500 if format != "fully_reshardable" else None  # it stores several buckets wrongly itself (#5077)
    source = saved.get("toy", format, bucket=bucket)
    truth = torch.load(source / "truth.pt")
    found = zero1ckpt.open(source)
    assert found.step == 3
    for name in found.names():
        for slot, field in FIELDS.items():
            wanted = truth[f"tp0_pp0/{name}/{field}"]
            assert torch.equal(found.read(name, slot).flatten(), wanted), (name, slot)
    assert len(found.names()) * len(FIELDS) == sum(not key.endswith("/weight") for key in truth)


def test_fully_reshardable_of_megatron_is_written_again(tmp_path: Path, saved: Saved, drive: Driver) -> None:
    source = saved.get("gpt_tp2", "fully_reshardable")
    zero1ckpt.reshard(source, tmp_path / "made", format="megatron:fully_reshardable", flavour="common_pt")
    _load(drive, tmp_path / "made", source, "gpt_tp2", 3)
