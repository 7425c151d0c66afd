"""When an incident reached each mark, as the operator observed it. Pure.

An incident that moves several slots has reached a mark once all of them have. The exception is
`leave`, which is set once the first slot is asked to leave. Marks are set once and never change.

A slot that no longer has to leave before it has left (the job's size is raised again, the node is
released) counts for no mark. If no other slot is moved either, the incident ends with `withdrawn`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from everstep_operator.jobs.membership import Decision, Leave
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import Incident, Mark, MovedSlot
from everstep_operator.values import NodeVerdict

RESUMED = "resumed"
"""The job trained again, before the moved slots did."""
RUNNING = "running"
WITHDRAWN = "withdrawn"
"""No slot has to leave any more, and none has left."""


def list_moved(incident: Incident) -> list[MovedSlot]:
    """The slots that the incident moves; an older operator wrote one entry for each slot. Empty:
    the job recovers without a move.
    """
    if incident.slots or incident.slot is None or incident.attempt is None:
        return incident.slots
    return [MovedSlot(slot=incident.slot, attempt=incident.attempt)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all incidents share in one pass."""

    observed: Observed
    attempts: Mapping[int, int]
    """Slot → current attempt."""
    asked: frozenset[int]
    """Slots that are asked to leave, or were until the last status was written."""
    inside: frozenset[int]
    """Slots whose current attempt is a member."""
    now: float


def build_scene(
    observed: Observed, attempts: Mapping[int, int], decisions: Sequence[Decision], now: float
) -> Scene:
    members = observed.seen.members if observed.seen else ()
    asked = {d.slot for d in decisions if isinstance(d, Leave)}
    return Scene(
        observed=observed,
        attempts=attempts,
        asked=frozenset(asked | {r.slot for r in observed.job.status.slots if r.leaving_since}),
        inside=frozenset(m.slot for m in members if attempts.get(m.slot, m.attempt) == m.attempt),
        now=now,
    )


def set_marks(scene: Scene, incident: Incident) -> Incident:
    moved = [_note_left(scene.observed, m) for m in list_moved(incident)]
    if not incident.open or not moved:
        return incident
    start = to_seconds(incident.started_at) or scene.now
    marks = {m.name: m.seconds for m in incident.marks}
    moving = [m for m in moved if not _is_withdrawn(scene, m)]
    reached = _list_reached(scene, incident, moving) if moving else [(WITHDRAWN, scene.now)]
    for name, at in reached:
        marks.setdefault(name, round(max(0.0, at - start), 3))
    return incident.model_copy(
        update={
            "slots": moved,
            "marks": [Mark(name=n, seconds=s) for n, s in marks.items()],
            "open": marks.keys().isdisjoint({RUNNING, WITHDRAWN}),
        }
    )


def is_withdrawn(incident: Incident) -> bool:
    return any(mark.name == WITHDRAWN for mark in incident.marks)


def reopen(incident: Incident) -> Incident:
    """The incident as it goes on if its slots have to leave again after it was withdrawn."""
    if not is_withdrawn(incident):
        return incident
    marks = [mark for mark in incident.marks if mark.name != WITHDRAWN]
    lost = incident.steps_lost if incident.phases else None
    return incident.model_copy(update={"marks": marks, "steps_lost": lost, "open": True})


def _is_withdrawn(scene: Scene, moved: MovedSlot) -> bool:
    """Whether the slot was to leave that attempt, and no longer has to."""
    if moved.left or moved.slot in scene.asked:
        return False
    return scene.attempts.get(moved.slot, moved.attempt) <= moved.attempt


def _note_left(observed: Observed, moved: MovedSlot) -> MovedSlot:
    """Record that the slot has left: its pod, and the job's report of the leave, may be gone before
    the last slot has left.
    """
    left = moved.left or observed.has_left(moved.slot, moved.attempt)
    return moved if left == moved.left else moved.model_copy(update={"left": left})


def _list_reached(
    scene: Scene, incident: Incident, moved: Sequence[MovedSlot]
) -> list[tuple[str, float]]:
    """Marks with the time at which they were reached."""
    verdict = scene.observed.verdicts.get(incident.node or "")
    found = list(verdict.marks.items()) if verdict and _is_of(incident, verdict) else []
    if any(m.slot in scene.asked for m in moved):
        found.append(("leave", scene.now))
    each = [set(_reached_by(scene, m)) for m in moved]
    common = set[str].intersection(*each)
    trains = RUNNING if RUNNING in common else RESUMED
    order = ("commit", "left", "deleted", "created", trains)
    return found + [(name, scene.now) for name in order if name in common]


def _reached_by(scene: Scene, moved: MovedSlot) -> Iterator[str]:
    observed, slot, old = scene.observed, moved.slot, moved.attempt
    current = scene.attempts.get(slot, old)
    if moved.left:
        yield from ("commit", "left")
    if current <= old:
        return
    former = observed.pod_of(slot, old)
    if former is None or former.deleting or former.over:
        yield "deleted"
    if observed.pod_of(slot, current) is not None:
        yield "created"
    if observed.running and not observed.is_member(slot, old):
        yield RESUMED
    if observed.running and _is_filled(scene, slot):
        yield RUNNING


def _is_of(incident: Incident, verdict: NodeVerdict) -> bool:
    return verdict.incident in (incident.id, incident.quarantine)


def _is_filled(scene: Scene, slot: int) -> bool:
    """Whether the slot's next pod is a member, or a spare has taken its place. A slot that is no
    longer wanted needs neither.
    """
    observed, spec = scene.observed, scene.observed.job.spec
    if slot not in observed.slots.wanted or slot in scene.inside:
        return True
    return spec is not None and len(scene.inside) >= spec.workers.replicas
