"""The results as a Markdown table. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from everstep_storm.faults import CALM
from everstep_storm.goodput import compare_states

Row = dict[str, Any]
HEAD = (
    "system", "faults", "step, s", "goodput", "of quiet seconds", "of the fastest", "next step, s", "longest, s",
    "steps taken again", "samples lost", "samples repeated", "hangs left", "end",
)  # fmt: skip


def build_table(rows: Sequence[Row], mix: str) -> str:
    """One line per system, the best goodput first."""
    calm = {row["system"]: row for row in rows if row["mix"] == CALM and not row["problem"]}
    found = [(_find_goodput(row, calm) or 0.0, row) for row in rows if row["mix"] == mix]
    lines = [_describe(row, calm) for _, row in sorted(found, key=lambda pair: -pair[0])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEAD, ["---"] * len(HEAD), *lines])


def find_goodput(row: Row, calm: Row) -> float:
    """Samples per second in the storm, divided by those of the undisturbed run."""
    ours: float = row["samples"] / row["seconds"]
    theirs: float = calm["samples"] / calm["seconds"]
    return ours / theirs


def _find_goodput(row: Row, calm: Mapping[str, Row]) -> float | None:
    own = calm.get(row["system"])
    return find_goodput(row, own) if own and "samples" in row else None


def _describe(row: Row, calm: Mapping[str, Row]) -> list[str]:
    if "samples" not in row:
        return [row["system"], *[""] * (len(HEAD) - 2), _shorten(row["problem"])]
    own, goodput = calm.get(row["system"]), _find_goodput(row, calm)
    fastest = max(
        (c for c in calm.values()), key=lambda c: c["samples"] / c["seconds"], default=None
    )
    pauses = [pause for pause in row["pauses"] if pause is not None]
    return [
        row["system"],
        _count_faults(row),
        f"{own['seconds'] / own['steps']:.3f}" if own else "",
        f"{goodput:.1%}" if goodput is not None else "",
        _describe_quiet(row),
        f"{find_goodput(row, fastest):.1%}" if fastest else "",
        f"{median(pauses):.2f}" if pauses else "",
        _describe_longest(row, pauses),
        *(f"{row[name]:,}" for name in ("steps_again", "samples_lost", "samples_repeated")),
        str(row["probed"]),
        _describe_end(row, own),
    ]


def _describe_quiet(row: Row) -> str:
    quiet = row.get("quiet_samples_per_second")
    return f"{row['samples'] / row['seconds'] / quiet:.1%}" if quiet else ""


def _count_faults(row: Row) -> str:
    kinds = [struck["kind"] for struck in row["struck"] if struck["pid"]]
    parts = [f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))]
    missed = len(row["struck"]) - len(kinds)
    return ", ".join([*parts, *([f"{missed} met no rank"] if missed else [])])


def _describe_longest(row: Row, pauses: Sequence[float]) -> str:
    late = len(row["pauses"]) - len(pauses)
    return f"{late} never" if late else f"{max(pauses):.2f}" if pauses else ""


def _describe_end(row: Row, calm: Row | None) -> str:
    """What the end of the run proves, and what went wrong."""
    if row["problem"]:
        return _shorten(row["problem"])
    if not row["proves"]:
        return ""
    verified = "refused by `everstep verify`" if row["verify"] else "verified"
    if calm is None:
        return verified
    both, differ = compare_states(calm["states"], row["states"])
    if differ:
        return f"{verified}, state differs from step {differ[0]}"
    return f"{verified}, state equal at all steps that both runs logged ({both})"


def _shorten(text: str) -> str:
    return " ".join(text.split())[:120].replace("|", "/")
