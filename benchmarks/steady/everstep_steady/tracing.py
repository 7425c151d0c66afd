"""How much of the reduction overlaps the backward pass, from a trace of torch's profiler. Pure.

The file is a Chrome trace: open it in Perfetto, or in chrome://tracing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BACKWARD = "autograd::engine::evaluate_function"
REDUCTION = "gloo:all_reduce"
Span = tuple[float, float]
"""Begin and end, in µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Sums over the traced steps, in ms."""

    reduction_ms: float
    hidden_ms: float
    """The part of `reduction_ms` during which the backward pass still ran."""

    def __str__(self) -> str:
        share = self.hidden_ms / self.reduction_ms if self.reduction_ms else 0.0
        return (
            f"{self.hidden_ms:.1f} of {self.reduction_ms:.1f} ms of reductions ({share:.0%}) "
            "lie under the backward pass"
        )


def measure_overlap(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """Measure the overlap from the trace's `traceEvents`."""
    timed = [e for e in events if e.get("ph") == "X"]
    backward = merge(_list_spans(timed, BACKWARD))
    reduction = merge(_list_spans(timed, REDUCTION))
    hidden = sum(_overlap(a, b) for a in reduction for b in backward)
    return Overlap(reduction_ms=sum(b - a for a, b in reduction) / 1e3, hidden_ms=hidden / 1e3)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap. Returns them sorted."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _list_spans(events: Sequence[Mapping[str, Any]], name: str) -> list[Span]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if name in e["name"]]


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
