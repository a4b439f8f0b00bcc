"""Checks the CUDA path on one GPU, and measures it, in less than 8 minutes: ``python tools/gpu_check.py --json FILE``.

Four sections. Correctness: the optimizer against torch's own on the card (equal bits), against the CPU (rounding), with
overlaps and over a one-rank NCCL group (equal bits), an overflow, and state that goes to a checkpoint, to the CPU and
back (equal bits). Step: bytes that must move in a step, over its time, over the rate at which the card copies.
Snapshot: rate at which state comes to the host, over that of a copy into pinned memory. Stall: what a synchronous and
an asynchronous save cost the training loop.

It needs torch, numpy, msgspec and awscrt, and this checkout; the package itself need not be installed. It works in a
temporary folder, which it removes, and ends by itself after ``--seconds``. Exit code 0: nothing failed, or there is no
GPU, and it says so; 1: a check failed; 2: a package is missing.

``--rehearse`` runs every line of it at a small size on the CPU; such figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import inspect
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PACKAGES = ("torch", "numpy", "msgspec", "awscrt")
STEPS = 20
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
OF_TRAINING = 1e-4
"""Bound of |card - CPU| / |change| after STEPS steps: float32 against float64 gives 4e-6 with this model."""
OF_UPDATE = 5e-6
"""The same where both get the same gradients: a few roundings of float32 a step."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=256_000_000, help="of the step section (256 M; less where short)")
    parser.add_argument("--save-params", type=int, default=64_000_000, help="of saves; 12 bytes each on disk (64 M)")
    parser.add_argument("--seconds", type=float, default=420, help="ends by itself after this time (420)")
    parser.add_argument("--dir", type=Path, help="where saves go (default: a temporary folder)")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU, where there is a GPU too")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing packages: pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    import torch

    if not args.rehearse and not torch.cuda.is_available():
        print("no GPU is at hand: nothing was checked")
        if args.json is not None:
            args.json.write_text(json.dumps({"script": "gpu_check", "ran": False, "device": None, "rows": []}) + "\n")
        return
    # A kill ends the script as an error does, so that its folder goes too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    work = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=args.dir))
    check = Check(args, work)
    guard = threading.Timer(args.seconds + 30, check.give_up)  # sections mind the time, but a kernel may hang
    guard.daemon = True
    guard.start()
    try:
        for section in (correctness, step_rate, snapshot_rate, stalls):
            check.section(section)
    finally:
        guard.cancel()
        shutil.rmtree(work, ignore_errors=True)
    return check.report()


@dataclass
class Row:
    """``verdict``: ok, FAILED, ERROR, not available, out of time, or nothing for a mere figure."""

    section: str
    what: str
    shown: str
    verdict: str
    values: dict[str, Any] = field(default_factory=dict)


class Check:
    """The device, the time that is left, and the rows so far."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        import torch

        self.args, self.work = args, work
        self.cuda = not args.rehearse
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.name = ""

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > self.args.seconds

    def add(self, what: str, shown: str, verdict: str = "", **values: Any) -> None:
        self.rows.append(Row(self.name, what, shown, verdict, values))

    def section(self, body: Callable[[Check], None]) -> None:
        self.name = body.__name__
        self.attempt("all of it", lambda: body(self))

    def attempt(self, what: str, body: Callable[[], None]) -> None:
        """An error becomes a row, and the rest goes on."""
        if self.late:
            self.add(what, "", "out of time")
            return
        try:
            body()
        except Exception as error:
            traceback.print_exc()
            self.add(what, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:100], "ERROR")
        gc.collect()
        if self.cuda:
            import torch

            torch.cuda.empty_cache()

    def expect(self, what: str, holds: bool, shown: str = "", **values: Any) -> None:
        self.add(what, shown, "ok" if holds else "FAILED", **values)

    def give_up(self) -> None:
        self.add("the whole script", f"not done after {self.args.seconds + 30:g} s", "FAILED")
        self.report()
        sys.stdout.flush()
        shutil.rmtree(self.work, ignore_errors=True)
        os._exit(1)

    def report(self) -> int:
        import torch

        width = max(len(row.what) for row in self.rows)
        for row in self.rows:
            print(f"{row.section:14} {row.what:{width}}  {row.shown:38} {row.verdict}".rstrip())
        bad = [row for row in self.rows if row.verdict in ("FAILED", "ERROR", "out of time")]
        card = torch.cuda.get_device_name(self.device) if self.cuda else "cpu (a rehearsal: figures mean nothing)"
        took = time.monotonic() - self.began
        print(f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}: {took:.0f} s, {len(bad)} bad")
        if self.args.json is not None:
            result = {
                "script": "gpu_check",
                "ran": True,
                "rehearsal": not self.cuda,
                "device": card,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "seconds": took,
                "ok": not bad,
                "rows": [vars(row) for row in self.rows],
            }
            self.args.json.write_text(json.dumps(result, indent=2) + "\n")
        return 1 if bad else 0

    # -------------------------------------------------------------------------------------------------------- timing

    def finish(self) -> None:
        """Return when the device has nothing to do."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def seconds(self, body: Callable[[], object]) -> float:
        """Of ``body`` on the device: what it launches, not how long the host takes to launch it."""
        self.finish()
        if not self.cuda:
            begin = time.perf_counter()
            body()
            return time.perf_counter() - begin
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def by_turns(self, cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
        """Median of what each case returns; the first turn does not count. At least one turn is made."""
        found: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            if number > 1 and self.late:
                break
            for name, case in cases.items():
                value = case()
                if number:
                    found[name].append(value)
        return {name: statistics.median(values) for name, values in found.items()}


# ------------------------------------------------------------------------------------------------------------ models


def mlp(device: Any, width: int = 96, seed: int = 0) -> Any:
    from torch import nn

    generator = seeded(seed)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width))
    for param in model.parameters():
        param.data.add_(_normal(param.shape, generator), alpha=0.02)
    return model.to(device)


def seeded(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def _normal(shape: Any, generator: Any) -> Any:
    import torch

    return torch.randn(shape, generator=generator)


def train(model: Any, optimizer: Any, device: Any, steps: int = STEPS, first: int = 0) -> None:
    """The same batches whatever the device."""
    width = model[0].in_features
    for step in range(first, first + steps):
        generator = seeded(step)
        x, y = (_normal((64, width), generator).to(device) for _ in range(2))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bag(device: Any, dtype: Any, shapes: Any) -> Any:
    """A model whose gradient is whatever ``backward_of`` is given, to the bit."""
    from torch import nn

    generator = seeded(1)
    return nn.ParameterList([nn.Parameter(_normal(shape, generator).to(device, dtype)) for shape in shapes])


def backward_of(model: Any, seed: int) -> None:
    generator = seeded(seed)
    grads = [_normal(param.shape, generator).to(param) for param in model]
    sum((param * grad).sum() for param, grad in zip(model, grads, strict=True)).backward()


def zero1(model: Any, **options: Any) -> Any:
    import torch

    from zero1ckpt import Zero1Optimizer

    return Zero1Optimizer(model, torch.optim.AdamW, **{**ADAMW, **options})


def flat(model: Any) -> Any:
    import torch

    return torch.cat([param.detach().flatten().float().cpu() for param in model.parameters()])


def slots(optimizer: Any) -> dict[str, Any]:
    """All state of a one-rank optimizer on the CPU, by slot, in the order of params."""
    import torch

    state: dict[str, list[Any]] = {}
    for param in optimizer.model_params:
        for slot, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                state.setdefault(slot, []).append(value.detach().flatten().cpu())
    return {slot: torch.cat(values) for slot, values in state.items()}


def off(found: Any, expected: Any, start: Any = 0.0) -> float:
    """|found - expected| / |expected - start|."""
    return float((found.double() - expected.double()).norm() / (expected.double() - start).norm())


def same(a: Any, b: Any) -> bool:
    """Equal bits, in all slots."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


# ------------------------------------------------------------------------------------------------------- correctness


def correctness(check: Check) -> None:
    for what, body in (
        ("float32 against torch's AdamW", against_torch),
        ("float32 training against the CPU", training_against_cpu),
        ("update against the CPU", update_against_cpu),
        ("overlaps and buckets", overlaps),
        ("one-rank group", one_rank_group),
        ("overflow", overflow),
        ("memory", memory),
        ("checkpoint to the CPU and back", there_and_back),
    ):
        check.attempt(what, lambda body=body: body(check))


def against_torch(check: Check) -> None:
    import torch

    plain, sharded = mlp(check.device), mlp(check.device)
    reference, optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW), zero1(sharded)
    train(plain, reference, check.device)
    train(sharded, optimizer, check.device)
    moments = {
        slot: torch.cat([reference.state[p][slot].flatten().cpu() for p in plain.parameters()])
        for slot in ("exp_avg", "exp_avg_sq")
    }
    ours = slots(optimizer)
    equal = torch.equal(flat(plain), flat(sharded)) and all(torch.equal(ours[k], moments[k]) for k in moments)
    check.expect("float32 against torch's AdamW, equal", equal, f"off by {off(flat(sharded), flat(plain)):.1e}")


def training_against_cpu(check: Check) -> None:
    start = flat(mlp("cpu"))
    models = [mlp("cpu"), mlp(check.device)]
    optimizers = [zero1(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, model[0].weight.device)
    host, card = (slots(optimizer) for optimizer in optimizers)
    found = {"params": off(flat(models[1]), flat(models[0]), start)}
    found.update({slot: off(card[slot], host[slot]) for slot in ("exp_avg", "exp_avg_sq")})
    worst = max(found.values())
    shown = f"off by {worst:.1e}, bound {OF_TRAINING:g}"
    check.expect("float32 training against the CPU", worst <= OF_TRAINING, shown, **found)


def update_against_cpu(check: Check) -> None:
    """The same gradients on both sides, two micro-batches a step, clipped."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = ((33, 65), (129,), (257, 64))
        models = [bag(device, dtype, shapes) for device in ("cpu", check.device)]
        start = flat(models[0])
        optimizers = [zero1(model, max_grad_norm=1.0, bucket_size=4096) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            for step in range(STEPS):
                with optimizer.no_sync():
                    backward_of(model, 2 * step)
                backward_of(model, 2 * step + 1)
                optimizer.step()
        host, card = (slots(optimizer) for optimizer in optimizers)
        found = {k: off(card[k], host[k], start if k == "fp32_param" else 0.0) for k in host if host[k].numel() > 99}
        worst = max(found.values())
        cast = torch.equal(flat(models[1]), card["fp32_param"].to(dtype).float())
        name = str(dtype).removeprefix("torch.")
        shown = f"off by {worst:.1e}, bound {OF_UPDATE:g}"
        check.expect(f"{name} update against the CPU", worst <= OF_UPDATE and cast, shown, **found)


def overlaps(check: Check) -> None:
    import torch

    models = [mlp(check.device), mlp(check.device)]
    options = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
    optimizers = [zero1(models[0]), zero1(models[1], **options)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, check.device)
        optimizer.wait_for_params()
    check.finish()
    equal = torch.equal(flat(models[0]), flat(models[1])) and same(slots(optimizers[0]), slots(optimizers[1]))
    check.expect("overlaps and buckets, equal bits", equal)


@contextlib.contextmanager
def group_of_one(check: Check) -> Iterator[Any]:
    """A process group, whose collectives are the backend's own even though there is nobody to talk to."""
    import torch.distributed as dist

    from zero1ckpt.engine import collectives

    make = collectives.make_communicator

    def native(group: Any, *args: Any, **options: Any) -> Any:
        return make(group, *args, **options) if group is None else collectives.NativeCommunicator(group)

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store, backend = f"file://{check.work}/store", "nccl" if check.cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        with contextlib.ExitStack() as patches:
            for name, module in list(sys.modules.items()):
                if name.startswith("zero1ckpt.engine.") and getattr(module, "make_communicator", None) is make:
                    patches.enter_context(mock.patch.object(module, "make_communicator", native))
            yield backend
    finally:
        gc.collect()
        dist.destroy_process_group()


def one_rank_group(check: Check) -> None:
    """Streams, events and handles of collectives, with all that can be in flight at once."""
    import torch

    plain = mlp(check.device)
    reference = zero1(plain)
    train(plain, reference, check.device)
    with group_of_one(check) as backend:
        for on in (False, True):
            model = mlp(check.device)
            optimizer = zero1(model, overlap_grad_reduce=on, overlap_param_gather=on, bucket_size=10_000)
            train(model, optimizer, check.device)
            optimizer.wait_for_params()
            check.finish()
            equal = torch.equal(flat(model), flat(plain)) and same(slots(optimizer), slots(reference))
            messages = optimizer.communicator.traffic.messages
            what = f"one-rank {backend} group, overlaps {'on' if on else 'off'}, equal bits"
            check.expect(what, equal and messages > 0, f"{messages} collectives")
            optimizer.close()
            del optimizer, model


def overflow(check: Check) -> None:
    import warnings

    import torch

    model = bag(check.device, torch.float16, ((64, 65),))
    optimizer = zero1(model, loss_scale="dynamic")
    before = flat(model)
    scale = optimizer.get_loss_scale()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the step was left out, which is what is asked for
        (model[0] * float("inf")).sum().backward()
        optimizer.step()
    left_out = optimizer.last.skipped and torch.equal(before, flat(model))
    optimizer.scale((model[0].float() / 65536).sum()).backward()
    optimizer.step()
    went_on = not optimizer.last.skipped and not torch.equal(before, flat(model))
    check.expect("float16 overflow leaves one step out", left_out and went_on, f"scale {scale:g}")


def memory(check: Check) -> None:
    """``optimizer.memory()`` against the allocator, which gives memory out in blocks of 512 bytes."""
    import torch

    what = "memory() against the allocator"
    if not check.cuda:
        check.add(what, "there is none on the CPU", "not available")
        return
    for dtype in (torch.float32, torch.bfloat16):
        batch = torch.ones(4, 512, device=check.device, dtype=dtype)
        mlp(check.device, 512).to(dtype)(batch).mean().backward()  # what cuBLAS takes for itself is there from now on
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = mlp(check.device, 512).to(dtype)
        optimizer = zero1(model, bucket_size=100_000)
        model(batch).mean().backward()
        optimizer.step()
        gc.collect()
        measured, told = torch.cuda.memory_allocated() - before, optimizer.memory().total
        shown = f"{told} bytes, measured {measured}"
        name = str(dtype).removeprefix("torch.")
        check.expect(f"{what}, {name}", abs(measured - told) <= 0.01 * told, shown, told=told, measured=measured)
        del model, optimizer


def there_and_back(check: Check) -> None:
    import torch

    import zero1ckpt

    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((33, 65), (129,), (257, 64))
        folder = check.work / str(dtype)
        models = [bag(device, dtype, shapes) for device in (check.device, "cpu", check.device)]
        card, host, back = (zero1(model, bucket_size=4096) for model in models)
        for step in range(3):
            backward_of(models[0], step)
            card.step()
        card.save(folder / "card").wait()
        host.load(folder / "card", verify=True)
        host.save(folder / "host").wait()
        back.load(folder / "host", verify=True)
        loaded = same(slots(card), slots(host)) and same(slots(card), slots(back))
        loaded = loaded and all(torch.equal(flat(models[0]), flat(model)) for model in models[1:])
        digests = {zero1ckpt.open(folder / name).digest for name in ("card", "host")}
        for model, optimizer in ((models[0], card), (models[2], back)):
            backward_of(model, 9)
            optimizer.step()
        goes_on = same(slots(card), slots(back))
        name = str(dtype).removeprefix("torch.")
        holds = loaded and goes_on and len(digests) == 1
        check.expect(f"{name} checkpoint to the CPU and back, equal bits", holds)


# ------------------------------------------------------------------------------------------------------------- rates


def matrices(check: Check, params: int) -> list[tuple[int, int]]:
    """Shapes of about so many params, 4096 x 4096 where that is enough of them."""
    width = 4096 if check.cuda else 128
    return [(width, width)] * max(1, params // width**2)


def step_rate(check: Check) -> None:
    """Bytes that must move, a param: param, gradient and both moments read, all but the gradient written, the gradient
    cleared (``step()`` leaves it zero); two more written where the model's params are of 16 bits.
    """
    import torch

    params = check.args.params if check.cuda else 200_000
    if check.cuda:
        params = min(params, torch.cuda.mem_get_info()[0] // 96)
    shapes = matrices(check, params)
    numel = sum(a * b for a, b in shapes)
    copied = torch.zeros(min(numel, 256 * MIB), device=check.device)
    into = torch.empty_like(copied)
    tensors = [torch.zeros(shape, device=check.device, requires_grad=True) for shape in shapes]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 0.5)
    reference = torch.optim.AdamW(tensors, **ADAMW)
    cases = {
        "copy": (8 * copied.numel(), lambda: check.seconds(lambda: into.copy_(copied))),
        "torch's fused AdamW": (28 * numel, lambda: check.seconds(reference.step)),
    }
    for dtype, nbytes in ((torch.float32, 32), (torch.bfloat16, 34)):
        name = f"step(), {str(dtype).removeprefix('torch.')} params"
        cases[name] = (nbytes * numel, step_case(check, shapes, dtype))
    took = check.by_turns({name: case for name, (_, case) in cases.items()}, 20)
    copy = cases["copy"][0] / took["copy"]
    for name, (nbytes, _) in cases.items():
        rate = nbytes / took[name]
        shown = f"{rate / 1e9:.1f} GB/s" + (f", {rate / copy:.2f} of the copy" if name != "copy" else "")
        check.add(name, shown, seconds=took[name], bytes=nbytes, rate=rate, over_copy=rate / copy, params=numel)


def step_case(check: Check, shapes: Any, dtype: Any) -> Callable[[], float]:
    import torch

    model = torch.nn.ParameterList([torch.zeros(shape, device=check.device, dtype=dtype) for shape in shapes])
    optimizer = zero1(model)

    def case() -> float:
        for param in model:
            param.sum().backward()
        return check.seconds(optimizer.step)

    return case


def saving_optimizer(check: Check) -> tuple[Any, Any, int]:
    """A model of ``--save-params`` that has been trained a little, and the bytes of its state."""
    from torch import nn

    params = check.args.save_params if check.cuda else 100_000
    params = min(params, shutil.disk_usage(check.work).free // 48)  # two checkpoints of 12 bytes, and as much again
    shapes = matrices(check, params)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in shapes)).to(check.device)
    optimizer = zero1(model)
    for _ in range(2):
        loop_step(model, optimizer)
    check.finish()
    return model, optimizer, 12 * sum(a * b for a, b in shapes)


def loop_step(model: Any, optimizer: Any, *, update: bool = True) -> None:
    import torch

    width = model[0].in_features
    model(torch.full((4096 if width > 1000 else 16, width), 0.5, device=model[0].weight.device)).mean().backward()
    if update:
        optimizer.step()


def is_asynchronous(check: Check, optimizer: Any, what: str) -> bool:
    there = "asynchronous" in inspect.signature(optimizer.save).parameters
    if not there:
        check.add(what, "save() has no asynchronous=", "not available")
    return there


def snapshot_rate(check: Check) -> None:
    import torch

    model, optimizer, nbytes = saving_optimizer(check)
    device = torch.zeros(min(nbytes, 512 * MIB), dtype=torch.uint8, device=check.device)
    pinned = torch.zeros(device.numel(), dtype=torch.uint8, pin_memory=check.cuda)
    pageable = torch.zeros(device.numel(), dtype=torch.uint8)
    cases = {
        "copy into pinned memory": (device.numel(), lambda: host_seconds(check, lambda: pinned.copy_(device, True))),
        "copy into pageable memory": (device.numel(), lambda: host_seconds(check, lambda: pageable.copy_(device))),
        "what a synchronous save reads": (nbytes, lambda: host_seconds(check, lambda: read_state(optimizer))),
    }
    if is_asynchronous(check, optimizer, "snapshot of an asynchronous save"):
        saves = iter(range(1000))
        cases["snapshot of an asynchronous save"] = (
            nbytes,
            lambda: snapshot_seconds(check, model, optimizer, check.work / f"snapshot{next(saves)}"),
        )
    took = check.by_turns({name: case for name, (_, case) in cases.items()}, 5)
    pinned_rate = device.numel() / took["copy into pinned memory"]
    for name, (size, _) in cases.items():
        rate = size / took[name]
        shown = f"{rate / 1e9:.2f} GB/s, {rate / pinned_rate:.2f} of the pinned copy"
        check.add(name, shown, seconds=took[name], bytes=size, rate=rate, over_pinned=rate / pinned_rate)


def host_seconds(check: Check, body: Callable[[], object]) -> float:
    """Until the host has it."""
    check.finish()
    begin = time.perf_counter()
    body()
    check.finish()
    return time.perf_counter() - begin


def read_state(optimizer: Any) -> None:
    """All shards through the reader that a save uses, 16 MiB at a time."""
    from zero1ckpt.training.saving import live_blobs

    blobs = live_blobs(optimizer, optimizer.slot_specs())
    end, window = int(blobs.segments(0)[-1]), bytearray(16 * MIB)
    for at in range(0, end, len(window)):
        blobs.read_run(optimizer.rank, at, [memoryview(window)[: min(len(window), end - at)]])


def snapshot_seconds(check: Check, model: Any, optimizer: Any, path: Path) -> float:
    """From the call of an asynchronous save until a ``step()`` right after it is done, less what that takes alone: it
    waits until all has been copied.
    """
    loop_step(model, optimizer, update=False)
    alone = host_seconds(check, optimizer.step)
    loop_step(model, optimizer, update=False)
    check.finish()
    begin = time.perf_counter()
    handle = optimizer.save(path, asynchronous=True)
    optimizer.step()
    check.finish()
    took = time.perf_counter() - begin
    handle.wait()
    shutil.rmtree(path)
    return max(took - alone, 1e-9)


def loop_seconds(check: Check, model: Any, optimizer: Any, steps: int = 5) -> float:
    """Of one step of the loop, when nothing else goes on."""
    return statistics.median(host_seconds(check, lambda: loop_step(model, optimizer)) for _ in range(steps))


def stalls(check: Check) -> None:
    """Time of the loop with a save, from its call until it has ended, less that of the steps taken meanwhile."""
    model, optimizer, nbytes = saving_optimizer(check)
    alone = loop_seconds(check, model, optimizer, 10)
    check.add("a step of the loop", f"{alone * 1e3:.2f} ms", seconds=alone)
    saves = iter(range(1000))

    def stall(**options: Any) -> float:
        path = check.work / f"stall{next(saves)}"
        check.finish()
        begin, steps = time.perf_counter(), 0
        handle = optimizer.save(path, **options)
        while options and not handle.done() and not check.late:
            loop_step(model, optimizer)
            check.finish()
            steps += 1
        handle.wait()
        took = time.perf_counter() - begin
        shutil.rmtree(path)
        return max(took - steps * alone, 0.0)

    cases: dict[str, Callable[[], float]] = {"synchronous save": stall}
    if is_asynchronous(check, optimizer, "asynchronous save"):
        cases["asynchronous save"] = lambda: stall(asynchronous=True)
    took = check.by_turns(cases, 3)
    for name, seconds in took.items():
        over = seconds / took["synchronous save"]
        shown = f"stall {seconds * 1e3:.1f} ms" + (f", {over:.3f} of the synchronous" if name[0] == "a" else "")
        check.add(name, shown, seconds=seconds, over_synchronous=over, bytes=nbytes)


if __name__ == "__main__":
    main()
