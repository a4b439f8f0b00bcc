"""Text for people: numbers, sizes, and names that cannot do anything to a terminal. All pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

__all__ = [
    "count",
    "first_and_last",
    "hyper_parameters",
    "json_safe",
    "one_line",
    "percent",
    "plural",
    "ranks_text",
    "safe",
    "shape_text",
    "short_bytes",
    "some",
]

# C0, C1, line and paragraph separators, and what turns the direction of text: a name must not move the cursor, clear
# the screen or hide behind another one. Lone surrogates (undecodable file names) cannot be encoded.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def safe(text: str) -> str:
    """The text with everything that is not printable written as an escape."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


_T = TypeVar("_T")


def first_and_last(rows: Sequence[_T], limit: int) -> Sequence[_T]:
    """The first few and the last two where there are more than ``limit``."""
    return rows if len(rows) <= limit else [*rows[: limit - 2], *rows[-2:]]


def one_line(text: str) -> str:
    """Everything on one line, and safe."""
    return safe(" ".join(text.split()))


def count(n: int) -> str:
    return f"{n:,}"


def short_bytes(n: int) -> str:
    """Bytes with the decimal unit that leaves at most three digits before the point."""
    value = float(n)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{n} B" if unit == "B" else f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def percent(part: int, whole: int) -> str:
    if not part or not whole:
        return "0 %"
    share = 100 * part / whole
    return "<0.1 %" if share < 0.05 else f"{share:.1f} %"


def plural(n: int, what: str) -> str:
    return f"{count(n)} {what}{'' if n == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape) if shape else "scalar"


def ranks_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few of some names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def hyper_parameters(group: dict[str, Any]) -> str:
    """A group's hyper-parameters on one line, without its params."""
    return ", ".join(f"{safe(key)} {_value(value)}" for key, value in group.items() if key != "params")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "(" + ", ".join(_value(item) for item in value) + ")"
    if isinstance(value, str):
        return safe(value)
    return json.dumps(value)


def json_safe(value: Any) -> Any:
    """A stored value as plain JSON: tuples as lists, what JSON has not as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex):
        return [json_safe(value.real), json_safe(value.imag)]
    return value
