"""Trains by turns with ``Zero1Optimizer``, DDP + fused AdamW, and what else shards optimizer state.

Cases: ``Zero1Optimizer``, and the same with both overlaps; DDP with gradients in its buckets and torch's fused AdamW,
the reference; ``ZeroRedundancyOptimizer``; DeepSpeed ZeRO-1 where it is installed. All live in the same processes, one
replica of the model each, and see the same batches. NCCL where there is a GPU a rank, else gloo on the CPU.

A turn starts from a barrier with nothing in flight and takes two steps, a lead-in and the timed one. ``seconds``: from
the return of the lead-in's ``step()`` to that of the second, mean over ranks: what an overlap leaves in flight is paid
for once, as in a long run, and no barrier hides it. ``drained``: half the time from the barrier until both steps are
done and nothing is in flight, slowest rank. Medians over ``--rounds`` turns; ``ratio`` and ``ratio_drained`` are those
over DDP's.

Counts that no machine changes, as this package counts what it sends: elements of params and gradients that a rank sends
a step, over 2 (dp - 1) / dp x the padded size of the buffers; messages, one a peer and window of a bucket on gloo, one
a collective on NCCL, without the one small message of flags. And bytes of optimizer state, without params, of the rank
that has most, over what DDP keeps; ``padding_bytes`` of the former belong to no param. DeepSpeed's include a copy of
the params, which it keeps whatever their dtype.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zero1ckpt import Zero1Optimizer

REFERENCE = "ddp + fused adamw"
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
WARMUP = 4
"""Turns that are not counted: DDP rearranges its buckets after a step, the order of gathers settles in three."""
COLUMNS = ("case", "seconds", "ratio", "ratio_drained", "sent_over_expected", "messages", "bytes_over_ddp", "loss")
"""Of the table; the JSON has all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case that count (20)")
    parser.add_argument("--warmup", type=int, default=WARMUP, help=f"turns before them ({WARMUP})")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step (8)")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--bucket-size", type=int, default=1_000_000, help="elements, with both overlaps (1 M)")
    parser.add_argument("--threads", type=int, help="of torch, a rank (default: the cores over the ranks)")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU even where there are GPUs")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    if args.ranks < 1 or args.rounds < 1 or args.warmup < 0:
        parser.error("--ranks and --rounds must be at least 1, --warmup at least 0")
    cpus = len(os.sched_getaffinity(0))
    args.threads = args.threads or max(1, cpus // args.ranks)
    args.cuda = not args.cpu and torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks > 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), nprocs=args.ranks)
        result = json.loads((Path(folder) / "result.json").read_text())
    common.report("step", [{key: row[key] for key in COLUMNS} for row in result["rows"]], None)
    shown = ", ".join(f"{key} {value}" for key, value in result["settings"].items())
    print(f"{shown}\nsame training in all cases (losses within 1 %): {'yes' if result['same_training'] else 'NO'}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["same_training"]:
        sys.exit("the cases do not train the same: the times are of no use")


# ------------------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.emb = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.Sequential(*(Block(args.hidden) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.emb(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# ------------------------------------------------------------------------------------------------------------ the cases


@dataclass
class Case:
    """One way to train. ``state``: the optimizer's tensors on this rank, without params. ``drain`` returns when nothing
    is in flight.
    """

    name: str
    model: nn.Module
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    state: Callable[[], Iterable[torch.Tensor]]
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    drain: Callable[[], object] = lambda: None
    zero1: Zero1Optimizer | None = None
    seconds: list[float] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)
    loss: float = 0.0

    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens)
        self.backward(loss)
        self.step()
        self.zero_grad()
        return loss


def cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Model(args).to(device)

    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": args.bucket_size}
    made = [
        of_ddp(model(), device),
        of_zero1("zero1", model(), {}),
        of_zero1("zero1, both overlaps", model(), overlaps),
        of_zero_redundancy(model(), device),
    ]
    deepspeed = import_deepspeed()
    if deepspeed is not None:
        made.append(of_deepspeed(deepspeed, model(), args, device))
    return made


def wrap(model: nn.Module, device: torch.device) -> nn.Module:
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def of_ddp(model: nn.Module, device: torch.device) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Case(REFERENCE, wrap(model, device), optimizer.step, optimizer.zero_grad, lambda: tensors_of(optimizer))


def of_zero1(name: str, model: nn.Module, options: dict[str, Any]) -> Case:
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, **options, **ADAMW)

    def state() -> Iterator[torch.Tensor]:
        for slot in optimizer.slot_specs()[1:]:  # the first are the main params: the model's own, here
            for number, buffer in enumerate(optimizer.layout.buffers):
                yield from (optimizer.shard(slot.name, number, bucket) for bucket in range(buffer.bucket_count))

    return Case(
        name,
        model,
        optimizer.step,
        optimizer.zero_grad,
        state,
        drain=optimizer.wait_for_params,
        zero1=optimizer,
    )


def of_zero_redundancy(model: nn.Module, device: torch.device) -> Case:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    return Case(
        "zero redundancy optimizer",
        wrap(model, device),
        optimizer.step,
        optimizer.zero_grad,
        lambda: tensors_of(optimizer.optim),
    )


def import_deepspeed() -> Any:
    """The module, or None. What it prints on the way is of no interest here."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        try:
            import deepspeed
        except Exception:  # not there, or not usable with what is: it raises what it likes
            return None
    return deepspeed


def of_deepspeed(deepspeed: Any, model: nn.Module, args: argparse.Namespace, device: torch.device) -> Case:
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    with quiet():
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=config)

    def state() -> Iterator[torch.Tensor]:
        yield from tensors_of(inner)
        yield from engine.optimizer.single_partition_of_fp32_groups  # a copy of the params, as 16-bit ones need

    return Case("deepspeed zero-1", engine, engine.step, lambda: None, state, backward=engine.backward)


@contextmanager
def quiet() -> Iterator[None]:
    """Sends what is printed meanwhile, by whatever means, to nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(fd) for fd in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(nowhere)


# ------------------------------------------------------------------------------------------------------------ the ranks


class Clock:
    """Marks on the device's time line: the host's clock on the CPU, events of the current stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds; after ``finish``."""
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))  # DeepSpeed asks
    dist.init_process_group(
        "nccl" if args.cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(minutes=5),
    )
    warnings.simplefilter("ignore")
    try:
        result = measure(args, device, Clock(device))
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()


def measure(args: argparse.Namespace, device: torch.device, clock: Clock) -> dict[str, Any]:
    entrants = cases(args, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.batch, args.sequence + 1)
    for number in range(args.warmup + args.rounds):
        batches = [torch.randint(args.vocab, shape, generator=generator).to(device) for _ in range(2)]
        counts = number >= args.warmup
        for case in entrants if number % 2 == 0 else entrants[::-1]:  # nobody always follows the same other
            seconds, drained = turn(case, batches, clock)
            if counts:
                case.seconds.append(seconds)
                case.drained.append(drained)
    rows = table([describe(case) for case in entrants])
    settings = {
        "ranks": args.ranks,
        "backend": dist.get_backend(),
        "threads": args.threads,
        "params": sum(p.numel() for p in entrants[0].model.parameters()),
        "rounds": args.rounds,
        "batch": args.batch,
        "sequence": args.sequence,
        "bucket_size": args.bucket_size,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if args.cuda else "cpu",
    }
    same = all(math.isclose(row["loss"], rows[0]["loss"], rel_tol=0.01) for row in rows)
    return {
        "benchmark": "step",
        "machine": common.machine(),
        "settings": settings,
        "same_training": same,
        "rows": rows,
    }


def turn(case: Case, batches: list[torch.Tensor], clock: Clock) -> tuple[float, float]:
    """Seconds of the second step, and half of those until both are done with all that they have sent."""
    if case.zero1 is not None:
        case.zero1.communicator.traffic.reset()
    clock.finish()
    dist.barrier()
    begin = time.perf_counter()
    case.train(batches[0])
    led_in = clock.mark()
    loss = case.train(batches[1])
    stepped = clock.mark()
    case.drain()
    clock.finish()
    drained = (time.perf_counter() - begin) / 2
    dist.barrier()
    case.loss = float(loss.detach())
    return clock.between(led_in, stepped), drained


def describe(case: Case) -> dict[str, Any]:
    """This rank's row, with what was sent in the last turn."""
    row: dict[str, Any] = {
        "case": case.name,
        "seconds_all": case.seconds,
        "drained_all": case.drained,
        "loss": case.loss,
        "optimizer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in case.state()),
    }
    if case.zero1 is not None:
        layout, traffic = case.zero1.layout, case.zero1.communicator.traffic
        row["padded_numel"] = layout.numel
        row["elements_sent"] = traffic.elements_sent / 2
        row["elements_expected"] = 2 * (case.zero1.dp_size - 1) * layout.numel / case.zero1.dp_size
        row["messages"] = traffic.messages / 2
        row["buckets"] = sum(buffer.bucket_count for buffer in layout.buffers)
        owned = sum(fragment.main.numel() for fragment in case.zero1.fragments)
        shards = layout.numel // case.zero1.dp_size
        row["padding_bytes"] = row["optimizer_bytes"] * (shards - owned) // max(shards, 1)
    return row


def table(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all ranks made one."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rows = []
    for ranks in zip(*everyone, strict=True):
        row = dict(ranks[0])
        row["seconds_all"] = [sum(turns) / len(turns) for turns in zip(*(r["seconds_all"] for r in ranks), strict=True)]
        row["drained_all"] = [max(turns) for turns in zip(*(r["drained_all"] for r in ranks), strict=True)]
        row["seconds"], row["drained"] = common.medians({"a": row["seconds_all"], "b": row["drained_all"]}).values()
        row["loss"] = sum(r["loss"] for r in ranks) / len(ranks)
        fullest = max(ranks, key=lambda r: r["optimizer_bytes"])
        row.update({key: fullest[key] for key in ("optimizer_bytes", "padding_bytes") if key in fullest})
        for key in ("elements_sent", "messages"):
            row[key] = max(r[key] for r in ranks) if key in row else ""
        row["sent_over_expected"] = ""
        if row.get("elements_expected"):
            row["sent_over_expected"] = row["elements_sent"] / row["elements_expected"]
        rows.append(row)
    reference = next(row for row in rows if row["case"] == REFERENCE)
    for row in rows:
        row["ratio"] = row["seconds"] / reference["seconds"]
        row["ratio_drained"] = row["drained"] / reference["drained"]
        row["bytes_over_ddp"] = row["optimizer_bytes"] / reference["optimizer_bytes"]
    return rows


if __name__ == "__main__":
    main()
