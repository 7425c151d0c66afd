"""The log lines of the ranks, as values. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rank applied one step."""

    t: float
    began: float
    """When the rank's process began, or last went back to an earlier step. The time of going back
    is taken as the middle between the lines before and after it.
    """
    pid: int
    step: int
    rank: int
    world: int
    samples: tuple[int, ...]
    passes: tuple[float, ...] = ()
    """Seconds of each of its micro-batches: forward and backward."""


def parse_lines(records: Iterable[dict[str, Any]]) -> list[Line]:
    """The applied steps, sorted by time.

    The records of a process must be in the order in which it wrote them, starting with its begin.
    """
    began: dict[int, float] = {}
    last: dict[int, tuple[int, float]] = {}
    """Pid → the newest step of the process, and its time."""
    found: list[Line] = []
    for r in records:
        if r["event"] == "begin":
            began[r["pid"]] = r["t"]
        if r["event"] != "step":
            continue
        step, t = last.get(r["pid"], (0, 0.0))
        if r["step"] <= step:
            began[r["pid"]] = (t + r["t"]) / 2
        last[r["pid"]] = r["step"], r["t"]
        samples = tuple(r["samples"])
        found.append(
            Line(
                t=r["t"], began=began[r["pid"]], pid=r["pid"],
                step=r["step"], rank=r["rank"], world=r["world"], samples=samples,
                passes=tuple(r.get("passes", ())),
            )
        )  # fmt: skip
    return sorted(found, key=lambda line: line.t)
