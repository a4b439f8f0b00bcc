"""Checkpoints that the command line is tried on, and a way to run it in this process."""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch

import zero1ckpt
from zero1ckpt.cli.main import run

SHAPES = {
    "wte.weight": (40, 8),
    "blocks.0.ln.weight": (8,),
    "blocks.0.ln.bias": (8,),
    "blocks.0.mlp.weight": (24, 8),
    "blocks.0.empty": (0, 3),
    "blocks.0.gate": (),
    "blocks.1.ln.weight": (8,),
    "blocks.1.mlp.weight": (24, 8),
}


def make_state(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            "fp32_param": torch.randn(shape, generator=generator),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
            "step": torch.tensor(7.0),
        }
        for name, shape in shapes.items()
    }


def write_checkpoint(path, *, seed=0, **options):
    state = make_state(seed)
    decay = [name for name in state if state[name]["fp32_param"].ndim == 2]
    groups = [
        {"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": decay},
        {"lr": 0.001, "betas": (0.9, 0.95), "eps": float("inf"), "params": [n for n in state if n not in decay]},
    ]
    params = {name: {"dtype": "bfloat16", "grad_dtype": "float32"} for name in decay}
    defaults = {"dp_size": 4, "bucket_size": 300, "step": 7, "groups": groups, "params": params}
    defaults["extra"] = {"scheduler": {"last_epoch": 7}, "seen": torch.arange(5)}
    return zero1ckpt.write(path, state, **(defaults | options))


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    write_checkpoint(folder / "step-7")
    return folder


@pytest.fixture
def ckpt(templates, work):
    """A fresh checkpoint: 4 ranks, two buffers, several buckets, two groups."""
    return shutil.copytree(templates / "step-7", work / "step-7")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self):
        """Standard output as the one document that it must be."""
        return json.loads(self.out)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command; whatever it answers, standard error holds at most one line and no traceback."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "ZERO1CKPT_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def call(*args):
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err.count("\n") == (1 if code else 0), err
        if code:
            assert err.startswith("zero1ckpt: ")
        return Result(code, out, err)

    return call


def flip(path, at=None):
    """Inverts one bit of a file, by default of its last byte but 40: data, not padding at the end."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)
