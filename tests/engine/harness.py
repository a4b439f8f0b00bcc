"""Runs a function on several ranks of a gloo group, each a process forked from a server that has torch loaded."""

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getfile

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "zero1ckpt.engine.zero1", "torch._dynamo.config"])


def run_ranks(size, fn, *args, timeout=120.0):
    """``[fn(rank, *args) for each rank]``, each in a process of its own with a default gloo group of ``size`` ranks.

    ``fn`` is a top-level function of a test file; a rank's error is raised here with its traceback. All processes are
    gone when this returns.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = []
        for rank in range(size):
            here, there = _CONTEXT.Pipe(duplex=False)
            job = (there, rank, size, store, getfile(fn), fn.__name__, _pack(args))
            process = _CONTEXT.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            there.close()
            workers.append((process, here))
        try:
            return _collect(workers, time.monotonic() + timeout)
        finally:
            for process, here in workers:
                process.kill()
                process.join()
                here.close()


def _collect(workers, deadline):
    results, errors = [None] * len(workers), []
    waiting = dict(enumerate(workers))
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} did not finish")
        for rank, (process, here) in list(waiting.items()):
            if here.poll(0.002):
                try:
                    ok, payload = here.recv()
                except EOFError:
                    ok, payload = False, f"rank {rank} ended with exit code {process.exitcode}"
                del waiting[rank]
                if ok:
                    results[rank] = _unpack(payload)
                else:
                    errors.append(payload)
                    deadline = min(deadline, time.monotonic() + 5)
        if errors and time.monotonic() > deadline - 4:
            break
    if errors:
        raise AssertionError("\n".join(errors))
    return results


def _rank_main(pipe, rank, size, store, path, name, packed):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        spec = spec_from_file_location("rank_module", path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        result = (True, _pack(getattr(module, name)(rank, *_unpack(packed))))
    except BaseException:
        result = (False, f"rank {rank}:\n{traceback.format_exc()}")
    pipe.send(result)
    pipe.close()
    os._exit(0)  # no destructors of a process group whose peers may be gone


def _pack(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpack(data):
    return torch.load(io.BytesIO(data), weights_only=False)
