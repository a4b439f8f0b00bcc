"""What users of Megatron-Core's ``DistributedOptimizer`` look for, under its names: views, nothing is held twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core.layout import Layout
from ..core.ranges import Range
from ..model.state import ParamSpec
from .shards import OwnedFragment

__all__ = ["MegatronViews", "ParamIndexMap"]

_SIXTEEN_BITS = ("bfloat16", "float16")


class ParamIndexMap(Mapping[torch.Tensor, tuple[int, int, int]]):
    """(start in the buffer, end in the buffer, bucket) of every model param, in the buffers' order.

    Keys are the model's params; a param's name finds its entry too.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._rows: dict[int, tuple[int, int, int]] = {}
        self._names: dict[str, torch.Tensor] = {}
        self._order: list[torch.Tensor] = []
        for buffer in layout.buffers:
            for place in buffer.placements:
                tensor = tensors[place.param]
                self._rows[id(tensor)] = (place.world.start, place.world.end, place.bucket)
                self._names[place.name] = tensor
                self._order.append(tensor)

    def __getitem__(self, param: torch.Tensor | str) -> tuple[int, int, int]:
        tensor = self._names[param] if isinstance(param, str) else param
        return self._rows[id(tensor)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class MegatronViews:
    """Mixed into an optimizer that has ``layout``, ``fragments`` and the model's params.

    The five lists have one entry a param group; in each, the params that this rank owns a part of, by buffer, bucket
    and place: ``local_group_order`` of Megatron's layouts.
    """

    layout: Layout
    fragments: tuple[OwnedFragment, ...]
    rank: int
    param_groups: list[dict[str, Any]]

    @property
    def model_params(self) -> Sequence[torch.Tensor]:
        """In registration order. Supplied by the optimizer."""
        raise NotImplementedError

    @property
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """In registration order. Supplied by the optimizer."""
        raise NotImplementedError

    def rank_in(self, buffer: int) -> int:
        """This rank in the group that a buffer is sharded over."""
        return self.rank

    # ------------------------------------------------------------------------------------------------------ range maps

    @property
    def param_index_map(self) -> ParamIndexMap:
        """Where every param lies in its buffer."""
        return ParamIndexMap(self.layout, self.model_params)

    @property
    def gbuf_ranges(self) -> list[dict[tuple[torch.dtype, torch.dtype], list[dict[str, Any]]]]:
        """By buffer and (param dtype, grad dtype), one ``{"param_map": {param: ranges}}`` a bucket.

        ``ranges``: the four views of what this rank owns of the param, ``gbuf_world``, ``gbuf_world_in_bucket``,
        ``gbuf_local`` and ``param``.
        """
        return [self._ranges_of_buffer(number) for number in range(len(self.layout.buffers))]

    def _ranges_of_buffer(self, number: int) -> dict[tuple[torch.dtype, torch.dtype], list[dict[str, Any]]]:
        buffer = self.layout.buffers[number]
        maps: list[dict[str, Any]] = [{"param_map": {}} for _ in range(buffer.bucket_count)]
        for part in buffer.fragments(self.rank_in(number)):
            maps[part.bucket]["param_map"][self.model_params[part.param_index]] = {
                "gbuf_world": part.gbuf_world,
                "gbuf_world_in_bucket": part.gbuf_world_in_bucket,
                "gbuf_local": part.gbuf_local,
                "param": part.param,
            }
        first = self.model_params[int(buffer.param[0])]
        grads: torch.Tensor = first.main_grad  # type: ignore[attr-defined]  # Megatron's attribute
        return {(first.dtype, grads.dtype): maps}

    @property
    def model_param_gbuf_map(self) -> dict[torch.Tensor, tuple[int, tuple[torch.dtype, torch.dtype], int]]:
        """Buffer, (param dtype, grad dtype) and bucket of every param that this rank owns a part of."""
        return {
            param: (number, key, bucket)
            for number, buffer in enumerate(self.gbuf_ranges)
            for key, maps in buffer.items()
            for bucket, ranges in enumerate(maps)
            for param in ranges["param_map"]
        }

    def get_model_param_range_map(self, param: torch.Tensor) -> dict[str, Range]:
        """The four views of what this rank owns of ``param``. ``KeyError`` where it owns nothing."""
        number, key, bucket = self.model_param_gbuf_map[param]
        ranges: dict[str, Range] = self.gbuf_ranges[number][key][bucket]["param_map"][param]
        return ranges

    # ------------------------------------------------------------------------------------------------------- the lists

    @property
    def model_float16_groups(self) -> list[list[torch.Tensor]]:
        """The model's params of 16 bits."""
        return self._by_group(True, lambda f: self.model_params[f.index])

    @property
    def model_fp32_groups(self) -> list[list[torch.Tensor]]:
        """The model's other params."""
        return self._by_group(False, lambda f: self.model_params[f.index])

    @property
    def shard_float16_groups(self) -> list[list[torch.Tensor]]:
        """Flat views of this rank's part of each of ``model_float16_groups``: memory of the param buffer."""
        return self._by_group(True, self._own_part)

    @property
    def shard_fp32_groups(self) -> list[list[torch.Tensor]]:
        """Of ``model_fp32_groups``; they are what the inner optimizer trains."""
        return self._by_group(False, lambda f: f.main)

    @property
    def shard_fp32_from_float16_groups(self) -> list[list[torch.Tensor]]:
        """The float32 main params of ``shard_float16_groups``; what the inner optimizer trains."""
        return self._by_group(True, lambda f: f.main)

    def _own_part(self, fragment: OwnedFragment) -> torch.Tensor:
        return self.model_params[fragment.index].detach().view(-1)[fragment.param.start : fragment.param.end]

    def _by_group(self, sixteen_bits: bool, pick: Any) -> list[list[torch.Tensor]]:
        rows: list[list[torch.Tensor]] = [[] for _ in self.param_groups]
        for fragment in self.fragments:
            if (fragment.spec.dtype in _SIXTEEN_BITS) == sixteen_bits:
                rows[fragment.spec.group].append(pick(fragment))
        return rows
