"""Tables, ages and sizes, for people. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}
SHOW_OPERATOR = "kubectl get pods -A -l app.kubernetes.io/name=everstep-operator"
"""For messages: the release may be in any namespace."""


def escape(text: str) -> str:
    """The text with control characters made visible, as kubectl does it: users write messages and names, and a
    terminal would obey what is in them.
    """
    return text.translate(_ESCAPES)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned as in kubectl, one line for each row; None and "" are shown as a dash."""
    cells = [[str(h) for h in head], *[[_cell(c) for c in row] for row in rows]]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    lines = ["   ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return text or "-"


def block(fields: Mapping[str, object], indent: str = "  ") -> str:
    """One field a line, with aligned values; empty values are left out."""
    shown = {k: str(v) for k, v in fields.items() if v is not None and v != ""}
    width = max((len(k) for k in shown), default=0) + 2
    behind = "\n" + indent + " " * width
    return "\n".join(f"{indent}{k:<{width}}{v.replace(chr(10), behind)}" for k, v in shown.items())


def seconds_of(stamp: Any) -> float | None:
    """An RFC 3339 stamp in seconds since 1970; None if there is none."""
    if not isinstance(stamp, str) or not stamp:
        return None
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def age(stamp: Any, now: float) -> str:
    """As kubectl writes it: 45s, 12m, 3h, 2d; empty if there is no stamp."""
    at = seconds_of(stamp) if not isinstance(stamp, int | float) else float(stamp)
    return "" if at is None else span(max(0.0, now - at))


def span(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def brief(seconds: float) -> str:
    """With two decimals below one second."""
    return f"{seconds:.2f} s" if seconds < 1 else took(seconds)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
