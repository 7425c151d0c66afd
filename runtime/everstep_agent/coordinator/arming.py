"""Arms the running epoch's boundary, and disarms it once it is over or given up."""

from collections.abc import Sequence

from everstep_agent.coordinator import boundaries, due_saves, members
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import WorkerReport
from everstep_agent.peers.epoch_level import Boundary


def arm(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    now: float,
    *,
    hold: bool = False,
    near: bool = False,
) -> None:
    watch.purpose, watch.raises, watch.armed_at = purpose, 0, now
    steps = (w.applied for w in workers)
    armed = boundaries.arm(steps, stay=bool(purpose) and not hold, hold=hold, near=near)
    if near:
        watch.near.arm(armed.step, due_saves.count_stalled(term), now)
    term.line.say(
        "boundary_armed",
        step=armed.step,
        purpose=purpose or ("NearSave" if near else "Save"),
        incident=term.state.incidents.id,
    )
    term.change(term.state.arm(armed))


def has_boundary_ahead(term: Term, workers: Sequence[WorkerReport]) -> bool:
    """Whether the ranks have a further step to take. After the last one they come to no boundary,
    however long the rest of their script takes.
    """
    return not is_beyond_end(term, max((w.applied for w in workers), default=0) + 1)


def is_beyond_end(term: Term, step: int) -> bool:
    inside = members.list_inside(term.running, term.reports.all())
    until = min((r.until for _, r in inside if r.until is not None), default=None)
    return until is not None and step > until


def disarm(term: Term, watch: Watch, boundary: Boundary, now: float) -> None:
    if not (boundary.near or boundary.hold):
        watch.save_at, watch.dropped_at = now, None
    watch.raises = 0
    term.change(term.state.disarm())
