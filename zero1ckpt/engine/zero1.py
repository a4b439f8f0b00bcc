"""``Zero1Optimizer``: optimizer state sharded over data-parallel ranks (ZeRO-1), in Megatron-Core's buffer layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import UsageError
from ..core.layout import Layout
from ..model.state import MAIN_PARAM, LossScale, ParamSpec, Scalar, SlotSpec
from .base import hyper_parameters
from .bucket_order import backward_order
from .buffers import make_buffers
from .collectives import Communicator, make_communicator
from .control import ControlPlane
from .experts import ArrivalFlags, expert_size, find_experts, verify_all
from .grad_scaler import DynamicScale, make_scaler
from .hierarchy import ParallelGroups, data_group, other_rank_refused, read_together
from .hooks import GradCollector, release_former
from .inner_state import InnerFactory, InnerTemplate, probe_inner
from .instances import instance_size, make_instances
from .live import plain_groups, update_group
from .mixed_precision import MixedPrecisionOptimizer
from .offload import HostLink, MainUpdate
from .options import EngineOptions, check_elementwise_option, choose_layout
from .overlap_grads import GradReducer
from .param_sync import ParamSync
from .params import ParamTable, collect_params
from .shards import OwnedFragment, ShardStore, owned_fragments
from .slot_state import SlotState, require_same_length
from .snapshot import SnapshotTaker
from .tree import TreeAccumulator, check_tree_dtypes
from .views import MegatronViews
from .waiting import read_timeout

__all__ = ["OwnedFragment", "Zero1Optimizer"]


class Zero1Optimizer(SnapshotTaker, MegatronViews, MixedPrecisionOptimizer):
    """An elementwise torch optimizer over 1/dp_size of every bucket.

    ``params``: a model, the chunks of one in a list, params, (name, param) pairs, or group dicts of either.
    ``name`` tells the optimizers of one process apart: ranks must make them alike. ``optimizer_class``: the inner
    optimizer's class, which gets ``options``. Gradients are averaged over ``process_group`` (default: the default
    group; without one, one rank). Params start with rank 0's values.

    ``overlap_grad_reduce``: a bucket is sent as its last gradient arrives, in the last backward before ``step()`` (mark
    the others with ``no_sync()``). ``overlap_param_gather``: updated params are gathered while the next forward runs;
    modules wait for their own. It needs the model: without one, and for what torch.compile has traced, ``step()``
    waits. ``align_param_gather=False`` launches gathers one by one as they are needed, not all of them in ``step()``:
    where ranks run the same modules and others need the links, as in a pipeline. None of these changes a result.

    ``grad_dtype``: of ``main_grad``, in which micro-batches add up (default float32, whatever the param).
    ``loss_scale``: a number, "dynamic" or a ``DynamicScale``; see ``mixed_precision`` for skipped steps and schedulers.
    ``reduce``: see the table in ``reductions``. ``elementwise=True``: no probe whether the optimizer may be sharded.
    ``layout``: one that was made before, instead of ``bucket_size``. ``timeout``: seconds that a rank waits for others
    before it names those that are missing (default: that of the process group).
    ``expert_group``: of the params with ``allreduce=False``; see ``experts``.
    ``offload``: main params, state and the inner step are on the host; see ``offload``.
    ``num_distributed_optimizer_instances``: state is sharded over so many parts of the group each; see ``instances``.

    ``model_parallel_group``, ``tensor_parallel_group``: over which norms and overflows are agreed besides; see
    ``hierarchy``.

    Raises ``UsageError`` and ``UnsupportedError`` on every rank when one rank's arguments are wrong or differ.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: InnerFactory,
        *,
        model: Any = None,
        process_group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
        name: str = "",
        bucket_size: int | str | None = None,
        grad_dtype: torch.dtype | str | None = None,
        loss_scale: float | str | DynamicScale | None = None,
        max_grad_norm: float | None = None,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        align_param_gather: bool = True,
        reduce: str = "mean",
        unused: str = "zero",
        num_distributed_optimizer_instances: int = 1,
        offload: bool = False,
        elementwise: bool | None = None,
        layout: Layout | None = None,
        timeout: timedelta | float | None = None,
        model_parallel_group: dist.ProcessGroup | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        group = data_group(process_group)
        self.name = name
        self.process_group = group
        self.control = ControlPlane(group, read_timeout(timeout))
        self.rank, self.dp_size, self.instance = self.control.rank, self.control.size, 0

        def read() -> tuple[EngineOptions, ParamTable, InnerTemplate]:
            check_elementwise_option(elementwise)
            engine = EngineOptions(
                bucket_size,
                overlap_grad_reduce,
                overlap_param_gather,
                unused,
                reduce,
                loss_scale,
                max_grad_norm,
                align_param_gather=align_param_gather,
                offload=bool(offload),
            )
            table = collect_params(params, model, grad_dtype, experts=expert_group is not None)
            self._parallel = ParallelGroups.of(model_parallel_group, tensor_parallel_group)
            self.dp_size = instance_size(self.control.size, num_distributed_optimizer_instances)
            self.instance, self.rank = divmod(self.control.rank, self.dp_size)
            self._parallel.check(table)
            experts = expert_size(expert_group, group, num_distributed_optimizer_instances)
            self.layout = choose_layout(layout, engine, table.specs, self.dp_size, experts)
            if reduce == "tree":
                check_tree_dtypes(table)
            scratch = torch.empty(0, dtype=table.main_dtype, device="cpu" if offload else table.device)
            template = probe_inner(
                optimizer_class, [g.options for g in table.groups], options, scratch, elementwise=bool(elementwise)
            )
            return engine, table, template

        self.options, self._table, template = read_together(self.control, read)
        self._agree(template, expert_group)
        self.experts = find_experts(self.control, expert_group, read_timeout(timeout))
        known = self._table.chunks or (params if isinstance(params, nn.Module) else model)
        self._build(optimizer_class, template, options, read_timeout(timeout), known)

    # ----------------------------------------------------------------------------------------------------- construction

    def _agree(self, template: InnerTemplate, expert: dist.ProcessGroup | None) -> None:
        ranks = f" expert groups of {dist.get_world_size(expert)}" if expert is not None else ""
        head = [("", f"{self.name!r} {template.name} {self.options} groups {len(self._table.groups)}{ranks}")]
        self.control.agree(head, "optimizers")
        self.control.agree(self._table.rows(), "params")

    def _build(
        self,
        factory: InnerFactory,
        template: InnerTemplate,
        options: Mapping[str, Any],
        timeout: timedelta | None,
        model: nn.Module | None,
    ) -> None:
        table = self._table
        names = [spec.name for spec in table.specs]
        release_former(table.tensors, names)
        self.buffers = make_buffers(self.layout, table.tensors, table.device)
        comm = make_instances(self.process_group, self.dp_size, table.device, self.options.reduce, timeout)
        if self.experts is not None:
            comm = self.experts.join(comm, self.layout, table.device, self.options.reduce, timeout)
        for number, buffer in enumerate(self.buffers):
            comm.of(number).broadcast(buffer.params)
        self._store = ShardStore(self.layout, self.buffers, comm, table.main_dtype, offload=self.options.offload)
        ranks = [comm.of(number).rank for number in range(len(self.buffers))]
        self.fragments = owned_fragments(self.layout, table.specs, self._store, ranks)
        self._copy_model_to_main(comm)
        self._tree = TreeAccumulator([b.grads for b in self.buffers]) if self.options.reduce == "tree" else None
        self._reduced = False
        self._unused: tuple[int, ...] = ()
        self._flags = ArrivalFlags(table.specs, self.experts)
        order = backward_order(self.layout)
        self._reducer = GradReducer(
            order,
            self.buffers,
            table.tensors,
            names,
            comm,
            table.main_dtype,
            overlap=self.options.overlap_grad_reduce,
        )
        self._collector = GradCollector(table.tensors, names, self.buffers, self._reducer, self._tree)
        self._params = ParamSync(
            order,
            self.buffers,
            table.tensors,
            names,
            model,
            comm,
            self.control,
            overlap=self.options.overlap_param_gather,
            align=self.options.align_param_gather,
        )
        self._collector.on_release = self._params.releaser()
        self._collector.check_arrival = self._params.gatherer.check_arrival
        self._loaded_scalars: Sequence[Mapping[str, Scalar]] = ()
        by_index = {f.index: f for f in self.fragments}
        inner = factory(
            [{**g.options, "params": [by_index[i].main for i in g.members if i in by_index]} for g in table.groups],
            **options,
        )
        super().__init__(
            inner,
            [[table.tensors[i] for i in g.members] for g in table.groups],
            {table.tensors[f.index]: f.main for f in self.fragments},
            comm=comm,
            device=table.device,
            max_grad_norm=self.options.max_grad_norm,
            scaler=make_scaler(self.options.loss_scale),
            model_parallel=make_communicator(self._parallel.model_parallel, table.device, "mean", timeout),
        )
        self._slots = SlotState(inner, template, self._store, self.fragments)
        link = HostLink(table.device) if self.options.offload else None
        self._update = MainUpdate(inner, self.fragments, self._store, self.buffers, comm, link)

    @property
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """In registration order."""
        specs: tuple[ParamSpec, ...] = self._table.specs
        return specs

    @property
    def model_params(self) -> Sequence[torch.Tensor]:
        return self._table.tensors

    @property
    def communicator(self) -> Communicator:
        return self.comm

    def rank_in(self, buffer: int) -> int:
        return self.comm.of(buffer).rank

    # ---------------------------------------------------------------------------------------------------- accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside are only added up: for all micro-batches of a step but the last.

        Reduction overlaps with a backward outside (``overlap_grad_reduce``), else all of it happens in ``step()``.
        """
        before, self._collector.synced = self._collector.synced, False
        try:
            yield
        finally:
            self._collector.synced = before

    def copy_grads_to_main(self) -> None:
        """Every bucket's mean over ranks; sums of 16-bit gradients go to float32 shards that live until the step ends.

        Raises ``UsageError`` for params that were moved or written to since the last step. All ranks raise where one
        does; gradients are kept, so that the step can be taken once the cause is gone.
        """
        self._collector.check_owned()
        self._params.wait()
        if self._reduced:
            problem = self._problem()
            if self.control.begin_any_of([problem is not None])()[0]:
                raise problem or other_rank_refused()
            return
        self._collector.sweep()
        self._collector.close()
        if self._tree is not None:
            self._tree.fold()
        problem = self._problem()
        params, extras = self._flags.size, self._reducer.extra_flags()
        arrived = self._flags.spread(self._collector.arrived)
        answer = self.control.begin_any_of([*arrived, *extras, problem is not None])
        self._reducer.finish()
        flags = answer()
        self._reducer.finish_extras(flags[params:-1])
        self._zero_frozen()
        self._unused = tuple(index for index, came in enumerate(self._flags.collect(flags[:params])) if not came)
        self._reduced = True
        if flags[-1]:
            raise problem or other_rank_refused()

    def _problem(self) -> UsageError | None:
        return self._params.problem() or self._reducer.problem()

    def _zero_frozen(self) -> None:
        """A param that was frozen after its bucket was sent counts in no norm."""
        for fragment, grad in zip(self.fragments, self.main_grad_pieces(), strict=True):
            if not self._table.tensors[fragment.index].requires_grad:
                grad.zero_()

    @property
    def _main_grads(self) -> list[list[torch.Tensor]]:
        return self._reducer.main_grads()

    def main_grad_shards(self) -> Sequence[torch.Tensor]:
        """The reduced gradient of this rank, one 1-D tensor a bucket; empty before it was reduced."""
        return [shard for shards in self._main_grads for shard in shards]

    def main_grad_pieces(self) -> Sequence[torch.Tensor]:
        grads = self._main_grads
        if not grads:
            return []
        return [grads[f.buffer][f.bucket][f.local.start : f.local.end] for f in self.fragments]

    def counted_grads(self, *, padded: bool) -> Sequence[torch.Tensor]:
        counted = self._parallel.counted(self._table.tensors)
        if all(counted):
            return self.main_grad_shards() if padded else self.main_grad_pieces()
        pieces = zip(self.fragments, self.main_grad_pieces(), strict=True)
        return [piece for fragment, piece in pieces if counted[fragment.index]]

    def drop_grads(self) -> None:
        self._collector.reset()
        self._reduced = False
        for fragment in self.fragments:
            fragment.main.grad = None

    def unused_names(self) -> tuple[str, ...]:
        return tuple(self._table.specs[i].name for i in self._unused)

    # ---------------------------------------------------------------------------------------------------------- update

    def update_main_params(self) -> None:
        frozen = {index for index, tensor in enumerate(self._table.tensors) if not tensor.requires_grad}
        self.before_change()
        self._update.step(self._main_grads, frozen.union(self._unused if self.options.unused == "skip" else ()))
        self._slots.after_step()

    def copy_main_to_model(self) -> None:
        """Cast this rank's main params into its slices of the param buffers, and gather the others'."""
        self._params.publish(lambda ref: self._update.cast(ref.buffer, ref.bucket))

    def wait_for_params(self) -> None:
        """Return when no gather is in flight (``overlap_param_gather``). To be called before params are read other than
        through their modules: by a list of them that was made earlier, through ``param_groups``, by another process or
        stream; and before the process group is destroyed.
        """
        self._params.wait()

    def verify_replicas(self) -> None:
        """Raises ``VerificationError`` that names rank and param unless all ranks hold the same bits. Collective."""
        self._params.wait()
        verify_all(self.control, self.experts, self._table.tensors, self._table.specs)

    def close(self) -> None:
        """Finish what is in flight, with all ranks, and take every hook off the model. Further steps are refused.

        An optimizer that is only dropped leaves no hook either; gathers that were in flight are waited for on use.
        """
        self._reducer.drop()
        self._collector.release("the optimizer was closed")

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Main params from the model's, cast up; to be called on all ranks after something else wrote to the model.

        Raises ``UsageError`` for a param that is no longer in its buffer.
        """
        self._params.wait()
        displaced = self._params.displaced()
        if displaced is not None:
            raise displaced
        self.before_change()
        self._copy_model_to_main(self.comm)
        self._params.accept()

    @torch.no_grad()
    def _copy_model_to_main(self, comm: Communicator) -> None:
        for number, buffer in enumerate(self.buffers):
            for bucket in range(buffer.layout.bucket_count):
                if self._store.apart(number):
                    own = comm.of(number).own(buffer.bucket_of_params(bucket))
                    self._store.shard(MAIN_PARAM, number, bucket).copy_(own)

    # ------------------------------------------------------------------------------------------ the state, for storage

    def shard(self, slot: str, buffer: int, bucket: int) -> torch.Tensor:
        """This rank's contiguous 1-D shard of ``slot``, no copy, padding zero. ``KeyError`` for an unknown slot."""
        self._params.wait()
        return self._store.shard(slot, buffer, bucket)

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        """Elementwise slots that exist, ``fp32_param`` first, the same on all ranks."""
        return self._slots.slot_specs()

    def expected_slots(self) -> tuple[SlotSpec, ...]:
        """``slot_specs``, and the slots that the inner optimizer's first step will make."""
        return self._slots.expected_specs()

    def local_scalars(self) -> dict[int, dict[str, Scalar]]:
        """Scalar slots by param index, for params that this rank owns a part of."""
        return self._slots.scalars()

    def local_absent(self) -> set[tuple[int, str]]:
        """(param index, slot) of owned params that have no value in a slot of ``slot_specs``."""
        return self._slots.absent()

    def group_values(self) -> tuple[dict[str, Any], ...]:
        """Hyper-parameters of each group, without params; 0-d tensors as numbers."""
        return plain_groups(self.param_groups)

    def check_load(self, slots: Sequence[SlotSpec], scalars: Sequence[Mapping[str, Scalar]]) -> None:
        """Raise what ``begin_load`` would raise; changes nothing."""
        self._slots.check_load(slots, scalars)

    @torch.no_grad()
    def begin_load(
        self,
        slots: Sequence[SlotSpec],
        absent: AbstractSet[tuple[int, str]],
        scalars: Sequence[Mapping[str, Scalar]],
        only: AbstractSet[int] | None = None,
    ) -> None:
        """Make room for ``slots``, so that the caller can fill ``shard(...)`` in place; then ``finish_load``.

        ``absent``: (param index, slot) that have no value. ``scalars[i]``: scalar state of param ``i``. State that
        is not given is as before the first step. ``only``: indices of params; others stay. Raises ``UnsupportedError``,
        with nothing changed, for a slot or scalar that the inner optimizer has not, and for a dtype not its own.
        """
        self.before_change()
        self._update.settle()
        self._slots.begin_load(slots, absent, scalars, only)
        self._loaded_scalars = scalars

    @torch.no_grad()
    def finish_load(
        self, step: int, groups: Sequence[Mapping[str, Any]] | None, loss_scale: LossScale | None = None
    ) -> None:
        """Put main params into the model (cast once, gathered), hyper-parameters into the groups, ``step`` into place.

        A param whose source has slots but no ``step`` scalar gets ``step``. ``groups``: one mapping a group in order,
        or None to keep those of this run. ``loss_scale``: None starts afresh. Gradients are dropped.
        """
        self.scaler.load(loss_scale)
        if groups is not None:
            require_same_length(groups, len(self.param_groups))
            for public, values in zip(self.param_groups, groups, strict=True):
                update_group(public, hyper_parameters(values))
            self.push_hyper_parameters()
        self._slots.fill_missing_step(step, self._loaded_scalars)
        self._loaded_scalars = ()
        self.applied_steps = step
        self._params.accept()
        self.copy_main_to_model()
        self.zero_grad()
