"""The measurements as a table. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_scale.meter import Usage

_VERBS = ("GET", "POST", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    seconds: float
    usage: Usage
    """Resources used in the phase."""
    asked: int = 0
    """Requests to agents."""
    scraped: int = 0
    """Requests to exporters."""
    changed: int = 0
    """The operator's objects that changed in the API server; the operator's own count of writes
    must agree.
    """


def render(phases: Sequence[Phase]) -> str:
    head = ["", "seconds", "writes", "write/s", *_VERBS, "agent/s", "scrape/s", "CPU %", "RSS MB"]
    rows = [head, *[_row(phase) for phase in phases]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        lines.append("  ".join([first, *[c.rjust(w) for c, w in zip(row[1:], widths[1:])]]))  # noqa: B905
    troubles = [
        f"{phase.name}: {count} calls ended {outcome}"
        for phase in phases
        for outcome, count in sorted(phase.usage.troubled.items())
    ]
    return "\n".join(lines + troubles)


def _row(phase: Phase) -> list[str]:
    used, seconds = phase.usage, phase.seconds
    return [
        phase.name,
        f"{seconds:.1f}",
        str(used.writes),
        f"{used.writes / seconds:.1f}",
        *(str(used.calls.get(verb, 0)) for verb in _VERBS),
        f"{phase.asked / seconds:.0f}",
        f"{phase.scraped / seconds:.0f}",
        f"{100 * used.cpu_seconds / seconds:.0f}",
        f"{used.resident_bytes / 1e6:.0f}",
    ]
