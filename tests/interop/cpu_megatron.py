"""Lets unmodified megatron-core run on a CPU over gloo: what it asks of CUDA is answered, its own code is left alone.

Call ``install`` before megatron is imported and ``use_fused_adam`` after.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install() -> None:
    _answer_cuda()
    _tell_cuda_types()
    _CudaMeansCpu().__enter__()  # for the life of the process
    _replace_collectives()


class _Stream:
    """A stream on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


def _returns(value: Any = None) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value() if callable(value) else value

    return answer


def _answer_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _returns(CPU)
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, _returns())
    cuda.device_count = _returns(1)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.get_device_capability = _returns((8, 0))
    cuda.get_device_properties = _returns(types.SimpleNamespace(major=8, minor=0, multi_processor_count=1))
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _returns(_Stream)
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _returns()


def _tell_cuda_types() -> None:
    """The optimizer compares the text of tensor types, and knows those of CUDA only."""
    plain = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        text = plain(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron.core.optimizer") and "cuda" not in text:
            return text.replace("torch.", "torch.cuda.", 1)
        return text

    torch.Tensor.type = kind  # type: ignore[method-assign, assignment]


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _reduce_scatter(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
    whole = input.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.SUM, group=group)
    if op == dist.ReduceOp.AVG:
        whole /= dist.get_world_size(group)
    count, rank = output.numel(), dist.get_rank(group)
    output.copy_(whole.view(-1)[rank * count : (rank + 1) * count].view_as(output))


def _all_gather(output_tensor: Any, input_tensor: Any, group: Any = None, **kwargs: Any) -> Any:
    parts = [torch.empty_like(input_tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, input_tensor.contiguous().clone(), group=group)
    output_tensor.view(-1).copy_(torch.cat([part.view(-1) for part in parts]))


def _replace_collectives() -> None:
    """Collectives that gloo lacks, made of those that it has; always synchronous."""
    module: Any = dist

    def wrapped(function: Any) -> Any:  # each name must be a function of its own
        return lambda *args, **kwargs: function(*args, **kwargs)

    module.reduce_scatter_tensor, module._reduce_scatter_base = wrapped(_reduce_scatter), wrapped(_reduce_scatter)
    module.all_gather_into_tensor, module._all_gather_base = wrapped(_all_gather), wrapped(_all_gather)

    @contextlib.contextmanager
    def coalescing(*args: Any, **kwargs: Any) -> Any:
        yield types.SimpleNamespace(wait=lambda: None)

    module._coalescing_manager = module.distributed_c10d._coalescing_manager = coalescing
    barrier = module.barrier
    module.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group=group, async_op=async_op)


def use_fused_adam() -> None:
    """A stand-in for the fused Adam of apex and Transformer Engine: the same state, and the step in the group."""
    import megatron.core.optimizer as package
    import megatron.core.optimizer.distrib_optimizer as module

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: Any = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0.0,
            **kwargs: Any,
        ) -> None:
            known = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            super().__init__(params, known)

        @torch.no_grad()
        def step(self, closure: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
            for group in self.param_groups:
                if group["params"]:
                    group["step"] = group.get("step", 0) + 1
                for param in group["params"]:
                    if param.grad is not None:
                        self._update(group, param)

        def _update(self, group: Any, param: Any) -> None:
            state, count, (first, second) = self.state[param], group["step"], group["betas"]
            if not state:
                state["exp_avg"] = torch.zeros_like(param.data).float()
                state["exp_avg_sq"] = torch.zeros_like(param.data).float()
            grad = param.grad.float()
            state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
            mean = state["exp_avg"] / (1 - first**count)
            root = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
            param.add_(mean / root + group["weight_decay"] * param, alpha=-group["lr"])

    package.Adam = module.Adam = FusedAdam
    if hasattr(package, "USING_PYTORCH_OPTIMIZER"):
        package.USING_PYTORCH_OPTIMIZER = False
    for name in ("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"):
        if hasattr(module, name):
            setattr(module, name, True)
