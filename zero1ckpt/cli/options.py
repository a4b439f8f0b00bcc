"""Arguments that several verbs share, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

import rich_click as click

__all__ = [
    "BUCKET",
    "BUCKET_SIZE",
    "COUNT",
    "DTYPE",
    "SIZE",
    "common",
    "copying",
    "dtype_of",
    "group_of",
    "layout_file",
    "reading",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """Bytes: a number and an optional unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        unit = _UNITS.get((match.group(2) or "b").lower()) if match else None
        if match is None or unit is None:
            self.fail(f"found {value!r}, expected a number and one of B, KB, MB, GB, KiB, MiB, GiB", param, ctx)
        return int(Decimal(match.group(1)) * unit)


class BucketSizeType(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """Elements, or ``none`` for one bucket a buffer."""

    name = "elements|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip().lower()
        if text == "none":
            return text
        if not re.fullmatch(r"\d+(_\d+)*", text) or int(text) < 1:
            self.fail(f'found {value!r}, expected a number of elements from 1 on, or "none"', param, ctx)
        return int(text)


class BucketType(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A bucket by its index in every buffer, or ``BUFFER.BUCKET``."""

    name = "bucket"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(?:(\d+)\.)?(\d+)", str(value).strip())
        if match is None:
            self.fail(f"found {value!r}, expected an index, or BUFFER.BUCKET", param, ctx)
        buffer, bucket = match.groups()
        return (None if buffer is None else int(buffer), int(bucket))


class CountType(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A number of things: 7B, 350M, 1e9, 7_000_000."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\d{1,2})?)\s*([kKmMbBtT]?)", str(value).strip())
        if match is None:
            self.fail(f"found {value!r}, expected a number, with K, M, B or T after it if you like", param, ctx)
        number = Decimal(match.group(1).replace("_", "").replace(",", ""))
        return int(number * 10 ** {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[match.group(2).lower()])


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_of(text: str) -> str:
    """The name that torch has for a dtype."""
    name = text.strip().lower().removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


class DtypeType(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A dtype by torch's name or the short one."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return dtype_of(str(value))


COUNT = CountType()
DTYPE = DtypeType()
SIZE = SizeType()
BUCKET_SIZE = BucketSizeType()
BUCKET = BucketType()


def group_of(text: str | None) -> int | str | None:
    """A group by its number, or a part by its name."""
    return int(text) if text is not None and text.isdigit() else text


def layout_file(verb: _F) -> _F:
    """``--layout``, which every verb has that reads a Megatron checkpoint's buffers."""
    return click.option(
        "--layout", metavar="FILE", help="How the params of a Megatron checkpoint lie in its buffers, as its run told."
    )(verb)


def common(verb: _F) -> _F:
    """``--json`` and ``--quiet``, which every verb has."""
    verb = click.option("--quiet", is_flag=True, help="Print nothing but errors, and the document of --json.")(verb)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(verb)


def copying(verb: _F) -> _F:
    """What ``reshard`` and ``convert`` have in common."""
    options = [
        click.option(
            "--from-dp", type=click.IntRange(min=1), metavar="N", help="Refuse SRC unless it has this dp size."
        ),
        click.option(
            "--bucket-size",
            type=BUCKET_SIZE,
            metavar="E|none",
            help="Elements of a bucket; none is one bucket a buffer. Default: as in SRC.",
        ),
        click.option("--container", metavar="C", help="What the bytes lie in. Default: as in SRC."),
        click.option("--shard-size", type=SIZE, metavar="SIZE", help="Begin a new file at this size, as 5GB."),
        click.option("--chunk-size", type=SIZE, metavar="SIZE", help="Size of the smallest unit that is read."),
        click.option("--compression", metavar="CODEC", help="Compress chunks. Default: as in SRC, else none."),
        click.option(
            "--no-verify", "verify", flag_value=False, default=True, help="Do not prove the checksums of SRC."
        ),
        click.option(
            "--unproved", is_flag=True, help="Take a Megatron checkpoint's map as it is where nothing proves it."
        ),
        click.option("--flavour", metavar="F", help="How a Megatron DST keeps its common state. Default: as in SRC."),
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--resume", is_flag=True, help="Go on after an interruption."),
        click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST."),
    ]
    verb = layout_file(reading(verb))
    for option in reversed(options):
        verb = option(verb)
    return verb


def reading(verb: _F) -> _F:
    """What every verb has that reads data."""
    verb = common(verb)
    verb = click.option(
        "--memory-limit", type=SIZE, metavar="SIZE", help="Bytes of data in flight, as 512MiB. Default: 256MiB."
    )(verb)
    return click.option(
        "--workers", type=click.IntRange(min=1), metavar="N", help="Threads. Default: one a core, at most 8."
    )(verb)
