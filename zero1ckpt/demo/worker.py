"""One rank of the demo's training; started by torchrun.

It is what a training script looks like: the parts that belong to zero1ckpt are the optimizer, ``save`` and ``load``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from .. import Zero1Optimizer
from .model import GPT, param_groups
from .text import Corpus, load_corpus

__all__ = ["main"]

_LR, _WARMUP = 3e-3, 10


@dataclass(frozen=True)
class Place:
    """Where this rank is, and on what."""

    rank: int
    ranks: int
    device: torch.device


def main(argv: Sequence[str] | None = None) -> None:
    """Trains; rank 0 writes the losses of all steps to ``--losses``."""
    options = _parse(argv)
    place = _start()
    corpus = load_corpus()
    torch.manual_seed(0)
    model = GPT(len(corpus.alphabet)).to(place.device)
    optimizer = Zero1Optimizer(
        param_groups(model),
        torch.optim.AdamW,
        model=model,
        lr=_LR,
        betas=(0.9, 0.95),
        bucket_size=options.bucket_size,
        max_grad_norm=1.0,
        foreach=False,
    )
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / _WARMUP, 0.98**step))
    first = 0
    if options.load:
        extra = optimizer.load(options.load)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["next step"]
    losses = []
    for step in range(first, options.steps):
        if step == options.save_at:
            optimizer.save(options.save, extra={"scheduler": scheduler.state_dict(), "next step": step})
            _say(place, f"saved {options.save}")
        losses.append(_train_step(model, optimizer, corpus, step, options.batch, place))
        scheduler.step()
        if step % 5 == 0 or step == options.steps - 1:
            _say(place, f"step {step:3d}  loss {losses[-1]:.4f}  lr {optimizer.param_groups[0]['lr']:.2e}")
    if place.rank == 0:
        Path(options.losses).write_text(json.dumps({"first": first, "losses": losses}))
    if dist.is_initialized():
        dist.destroy_process_group()


def _parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="zero1ckpt.demo.worker", description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--batch", type=int, required=True, help="sequences of a step, of all ranks together")
    parser.add_argument("--bucket-size", type=int, required=True)
    parser.add_argument("--save-at", type=int, help="save before this step")
    parser.add_argument("--save", help="where")
    parser.add_argument("--load", help="start from this checkpoint")
    parser.add_argument("--losses", required=True, help="JSON file of the losses")
    return parser.parse_args(argv)


def _start() -> Place:
    """Joins the group that torchrun has made: NCCL where each rank can have a GPU of its own, else gloo."""
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    place = Place(dist.get_rank(), ranks, device)
    _say(place, f"{ranks} ranks on {'GPUs, NCCL' if on_gpu else 'CPU, gloo'}")
    return place


def _train_step(model: GPT, optimizer: Zero1Optimizer, corpus: Corpus, step: int, batch: int, place: Place) -> float:
    """One update; returns the loss of the whole batch."""
    inputs, targets = (part.to(place.device) for part in corpus.batch(step, batch, place.rank, place.ranks))
    logits = model(inputs).float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / place.ranks


def _say(place: Place, line: str) -> None:
    if place.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
