"""The figures of a story, and the table at the end of the suite."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep_demo.timeline import Timeline


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One row of the table: a story, which may consist of several tests."""

    story: str
    seconds: float = 0.0
    ended: str = "ok"
    first_step: float | None = None
    """Seconds from the fault to the first new step; None if the job never stopped."""
    steps_lost: int | None = None
    samples_lost: int | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)
    """(name, seconds) of each phase."""


class Recorder:
    """Prints each phase as it happens and keeps it for the table."""

    def __init__(self, outcome: Outcome, timeline: Timeline) -> None:
        self.outcome, self.timeline = outcome, timeline

    def say(self, what: str, detail: str = "") -> None:
        self.timeline.say(what, detail)

    def phase(self, name: str, seconds: float, detail: str = "") -> None:
        self.outcome.phases.append((name, seconds))
        self.timeline.say(name, f"{seconds:.1f} s{'; ' if detail else ''}{detail}")


def build_table(outcomes: Sequence[Outcome]) -> str:
    """The table at the end of the suite."""
    head = ("story", "", "fault → first new step", "steps lost", "samples lost", "took")
    rows = [head, *map(_row, outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.story.replace("_", " "),
        outcome.ended,
        "–" if outcome.first_step is None else f"{outcome.first_step:.1f} s",
        "–" if outcome.steps_lost is None else str(outcome.steps_lost),
        "–" if outcome.samples_lost is None else str(outcome.samples_lost),
        f"{outcome.seconds:.0f} s",
    )


def build_phases(outcome: Outcome) -> str:
    """One line with a story's phases; empty if it has none."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.phases)
    return f"{outcome.story.replace('_', ' ')}: {phases}" if phases else ""
