"""The results as Markdown tables. Pure."""

from collections.abc import Sequence
from math import ceil, inf, isfinite
from statistics import median, median_low
from typing import Any

from everstep_recovery.faults import FAULTS
from everstep_recovery.systems import SYSTEMS

Row = dict[str, Any]
OURS, OURS_SHARDED = "everstep in place", "everstep in place, shard=2"
_COLUMNS = (
    ("seconds_to_full_size", "full size, s"),
    ("steps_lost", "steps taken again"),
    ("samples_lost", "samples lost"),
    ("samples_repeated", "samples repeated"),
)


def name(row: Row) -> str:
    return f"{row['system']} {row['settings']}".strip()


def split_by_shard(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(rows of systems in which each rank holds the whole model, rows of systems that shard it)."""
    sharded = {s.title for s in SYSTEMS if s.sharded}
    return [r for r in rows if name(r) not in sharded], [r for r in rows if name(r) in sharded]


def build_table(rows: Sequence[Row], ours_title: str = OURS) -> str:
    """One line per system: the median (minimum to maximum) of its runs.

    × is the first column divided by that of `ours_title`.
    """
    ours = _values(_of(rows, ours_title), "seconds_to_next_step")
    head = ["system", "runs", "next step, s", "p95", *(title for _, title in _COLUMNS), "×"]
    lines = [head]
    for title in sorted({name(row) for row in rows}):
        own = _of(rows, title)
        values = _values(own, "seconds_to_next_step")
        lines.append([
            title, str(len(own)), _describe(own, "seconds_to_next_step"),
            f"{find_p95(values):.3g}" if values else "",
            *(_describe(own, column) for column, _ in _COLUMNS),
            f"{median(values) / median(ours):.2f}" if values and ours else "",
        ])  # fmt: skip
    return _to_markdown(lines)


def build_split_table(rows: Sequence[Row]) -> str:
    """The parts of the next step in ms, for the systems that keep their step: medians; for
    `beyond`, median / p95 / maximum. Empty: there is no such run.
    """
    head = ["system", "ranks", "runs", "step", "rest", "again", "beyond", "within 60"]
    lines = [head]
    for title, ranks in sorted({(name(r), r["ranks"]) for r in rows if r.get("split")}):
        if not title.startswith("everstep in place"):
            continue
        own = [r["split"] for r in _of(rows, title) if r["ranks"] == ranks and r.get("split")]
        parts = {part: [1000 * split[part] for split in own] for part in own[0]}
        beyond = parts["beyond"]
        lines.append([
            title, str(ranks), str(len(own)),
            *(f"{median(parts[part]):.0f}" for part in ("step", "rest", "again")),
            f"{median(beyond):.0f} / {find_p95(beyond):.0f} / {max(beyond):.0f}",
            f"{sum(ms <= ALLOWED_MS for ms in beyond)} of {len(beyond)}",
        ])  # fmt: skip
    return _to_markdown(lines) if len(lines) > 1 else ""


ALLOWED_MS = 60
"""Limit for a survivor beyond the rest of its step and the passes that it computes again."""


def find_p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def build_short_table(rows: Sequence[Row]) -> str:
    """For the README: each system with a next step, the fastest first."""
    columns = ("seconds_to_next_step", "seconds_to_full_size", "steps_lost", "samples_lost")
    found: dict[str, float] = {}
    for title in {name(row) for row in rows}:
        if values := _values(_of(rows, title), columns[0]):
            found[title] = median(values)
    lines = [
        [
            f"{rows[0]['fault'] if rows else 'SIGKILL'} of one of the ranks",
            "next step, s",
            "full size, s",
            "steps taken again",
            "samples lost",
        ]
    ]
    for title in sorted(found, key=lambda title: found[title]):
        own = _of(rows, title)
        lines.append([title, *(_describe(own, column) for column in columns)])
    return _to_markdown(lines)


def build_fault_table(rows: Sequence[Row]) -> str:
    """All faults side by side: for each system "next step / full size" in seconds, medians. A dash:
    most runs did not come so far within the limit. An empty cell was not run.
    """
    faults = [fault for fault in FAULTS if any(row["fault"] == fault for row in rows)]
    lines = [["next step / full size, s", *faults]]
    for title in _by_next_step(rows):
        own = _of(rows, title)
        cells = [[row for row in own if row["fault"] == fault] for fault in faults]
        lines.append([title, *(_describe_pair(cell) for cell in cells)])
    return _to_markdown(lines)


def _by_next_step(rows: Sequence[Row]) -> list[str]:
    """The systems, the fastest first; at the end those that take no next step."""
    titles = sorted({name(row) for row in rows})
    return sorted(titles, key=lambda t: _median(_of(rows, t), "seconds_to_next_step"))


def _describe_pair(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    pair = [_median(rows, column) for column in ("seconds_to_next_step", "seconds_to_full_size")]
    return " / ".join(f"{seconds:.2g}" if isfinite(seconds) else "–" for seconds in pair)


def _median(rows: Sequence[Row], column: str) -> float:
    """Infinite if most of the runs did not come so far within the limit."""
    played = [row[column] for row in rows if not row["problem"]]
    return median_low(inf if seconds is None else seconds for seconds in played) if played else inf


def _to_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])


def _of(rows: Sequence[Row], title: str) -> list[Row]:
    return [row for row in rows if name(row) == title]


def _values(rows: Sequence[Row], column: str) -> list[float]:
    return [row[column] for row in rows if row.get(column) is not None]


def _describe(rows: Sequence[Row], column: str) -> str:
    played = [row for row in rows if not row["problem"]]
    never = _explain_never_whole(rows[0]) if rows else ""
    if never and column == "seconds_to_full_size":
        return f"never: {never}"
    values = _values(played, column)
    late = len(played) - len(values)
    parts = []
    if values:
        low, middle, high = min(values), median(values), max(values)
        parts.append(f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g}–{high:.3g})")
    if late:
        parts.append(f"{late} not within {played[0]['limit']:.0f} s")
    if failed := len(rows) - len(played):
        parts.append(f"{failed} did not start")
    return "; ".join(parts)


def _explain_never_whole(row: Row) -> str:
    stops = FAULTS[row["fault"]].stops
    found = (s.explain_never_whole(stops=stops) for s in SYSTEMS if s.title == name(row))
    return next(found, "")
