"""The base layer: a ``torch.optim.Optimizer`` over the model's params in front of an inner one over other tensors.

What a subclass trains (``inner``'s params) may be shards or copies of what the user sees (``param_groups``). This
layer keeps the two in step: hyper-parameters in both directions, state by reference.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch

from ..core.errors import UnsupportedError
from ..model.state import MAIN_PARAM

__all__ = ["OptimizerBase", "StepReport", "hyper_parameters"]

_NOT_HYPER = ("params", "param_names")


class StepReport:
    """What the last step did, the same on all ranks: ``optimizer.last``.

    ``grad_norm``: global 2-norm of the reduced and unscaled gradient before clipping; None where it was not computed
    (no ``max_grad_norm``) or is not finite under a loss scale. Reading it waits for the device. ``found_inf``: a
    gradient was not finite on some rank; only a loss scale looks for that. ``skipped``: nothing was updated, ``step``
    did not count, and a scheduler should not be stepped. ``unused``: names of params that got no gradient on any rank.
    """

    def __init__(
        self,
        norm: torch.Tensor | None = None,
        found_inf: bool = False,
        skipped: bool = False,
        unused: tuple[str, ...] = (),
    ) -> None:
        self._norm = norm
        self.found_inf = found_inf
        self.skipped = skipped
        self.unused = unused

    @property
    def grad_norm(self) -> float | None:
        return None if self._norm is None else float(self._norm)

    def __repr__(self) -> str:
        return (
            f"StepReport(grad_norm={self.grad_norm}, found_inf={self.found_inf}, "
            f"skipped={self.skipped}, unused={self.unused})"
        )


class OptimizerBase(torch.optim.Optimizer):
    """Public face of ``inner``. ``public_params[g]`` are the model's params of inner group ``g``.

    ``trained`` maps a model param to the tensor that stands for it in ``inner``, where this process has one.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        public_params: Sequence[Sequence[torch.Tensor]],
        trained: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self.inner = inner
        self.last = StepReport()
        self._built = False
        groups = [
            {**hyper_parameters(group), "params": list(params)}
            for group, params in zip(inner.param_groups, public_params, strict=True)
        ]
        super().__init__(groups, dict(inner.defaults))
        self._built = True
        self.state = cast(Any, StateView(inner.state, trained))

    def __getstate__(self) -> Any:
        """Of a copy or a pickle: there is none, for hooks, process groups and the model's params are not copied."""
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be copied or pickled; build another one over the copy of the model, and "
            "save and load its state"
        )

    # ------------------------------------------------------------------------------------------ what subclasses supply

    @abstractmethod
    def prepare_grads(self) -> bool:
        """Make the gradients ready for ``inner``; True where one is not finite and the step must be left out."""

    @abstractmethod
    def step_with_ready_grads(self) -> None:
        """Update the params from ready gradients."""

    @abstractmethod
    def get_loss_scale(self) -> float:
        """What ``scale`` multiplies by."""

    @abstractmethod
    def reload_model_params(self) -> None:
        """Take the model's params as the new main params, after something other than ``step`` wrote to them."""

    @abstractmethod
    def main_grad_shards(self) -> Sequence[torch.Tensor]:
        """1-D tensors that hold each gradient element of this rank once."""

    # ------------------------------------------------------------------------------------------------ common behaviour

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call ``backward`` on; the loss itself unless a loss scale is set."""
        factor = self.get_loss_scale()
        return loss if factor == 1.0 else loss * factor

    def push_hyper_parameters(self) -> None:
        """Edits of ``param_groups`` (by schedulers) reach the inner optimizer."""
        for public, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(hyper_parameters(public))

    def pull_hyper_parameters(self) -> None:
        """What the inner optimizer keeps in its groups (a step counter) is seen in ``param_groups``."""
        for public, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            public.update(hyper_parameters(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made; afterwards ``UnsupportedError``: the buffers are laid out."""
        if getattr(self, "_built", False):
            raise UnsupportedError(
                "add_param_group after construction", hint="build a new optimizer and load with missing='init'"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        raise UnsupportedError("state_dict() would hold one rank's shards", hint="use save(path)")

    def load_state_dict(self, state_dict: Any) -> None:
        raise UnsupportedError("load_state_dict() would need one rank's shards", hint="use load(path)")


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a param group without its params."""
    return {key: value for key, value in group.items() if key not in _NOT_HYPER}


class StateView(Mapping[torch.Tensor, "ParamState"]):
    """``optimizer.state``: keys are the model's params that this rank owns a part of."""

    def __init__(self, inner: Mapping[torch.Tensor, Any], trained: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._params = {param: ParamState(inner, tensor) for param, tensor in trained.items()}

    def __getitem__(self, param: torch.Tensor) -> ParamState:
        return self._params[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class ParamState(MutableMapping[str, Any]):
    """Slots of one param on this rank: ``fp32_param``, then what the inner optimizer keeps, flat and by reference."""

    def __init__(self, inner: Mapping[torch.Tensor, Any], tensor: torch.Tensor) -> None:
        self._inner, self._tensor = inner, tensor

    def _slots(self) -> MutableMapping[str, Any]:
        # Without making an entry: optimizers ask "p in self.state" before they initialise one.
        return cast(MutableMapping[str, Any], self._inner[self._tensor]) if self._tensor in self._inner else {}

    def __getitem__(self, slot: str) -> Any:
        return self._tensor.detach() if slot == MAIN_PARAM else self._slots()[slot]

    def __setitem__(self, slot: str, value: Any) -> None:
        if slot == MAIN_PARAM:
            raise UnsupportedError("the main param cannot be replaced", hint="write to it in place")
        self._inner[self._tensor][slot] = value

    def __delitem__(self, slot: str) -> None:
        del self._slots()[slot]

    def __iter__(self) -> Iterator[str]:
        yield MAIN_PARAM
        yield from self._slots()

    def __len__(self) -> int:
        return 1 + len(self._slots())

    def __repr__(self) -> str:
        return repr(dict(self))
