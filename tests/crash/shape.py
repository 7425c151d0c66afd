"""The part of the end state that must be the same whatever happened before. It has no times, UIDs
or figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract import names

Object = dict[str, Any]
Pod = tuple[str, str, bool]
OUR_MARK = "everstep.dev/cordoned-by"
STEADY = ("Running", "Recovering", "Suspended", "Complete", "Failed")
"""The conditions that are compared. `ObserveOnly` and `Stalled` are left out, because they are the
same in every scenario or depend on time alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    state: str
    conditions: tuple[tuple[str, str, str], ...]
    """(type, status, reason)"""
    slots: tuple[tuple[int, int, str], ...]
    """(slot, attempt, cause), except for spares"""
    restarts: tuple[tuple[str, int], ...]
    """(cause, number). Each fault counts once, even if it killed a rank more than once before the
    rank was moved.
    """
    uncounted: int
    """Difference between restarts.total and the sum of its causes; must be 0."""
    incidents: tuple[tuple[str, int, int, bool], ...]
    """(cause, slot, attempt, open)"""
    pods: tuple[Pod, ...]
    """(name without the job's prefix, phase, whether it is being deleted). A spare in the place of a slot gets that
    slot's name, because it is chance whether the slot's next pod or the spare is ready first.
    """
    ready: str
    """The world's summary; empty once the job is over."""
    marks: tuple[tuple[bool, bool, bool], ...]
    """(cordoned, tainted, annotated) of each marked node."""
    quarantines: tuple[tuple[str, str], ...]
    """(verdict, state)"""


def build_shape(
    job: Object, pods: Sequence[Object], nodes: Sequence[Object], quarantines: Sequence[Object]
) -> Shape:
    status, name = job.get("status", {}), job["metadata"]["name"]
    restarts = status.get("restarts") or {}
    incidents = status.get("incidents", [])
    over = status.get("state") in ("Complete", "Failed")
    marks = [found for found in map(mark_of, nodes) if any(found)]
    size = job["spec"]["workers"]["replicas"]
    listed = tuple((s["slot"], s["attempt"], s.get("cause", "")) for s in status.get("slots", []))
    slots = tuple(slot for slot in listed if slot[0] < size)
    return Shape(
        state=status.get("state", ""),
        conditions=_conditions(status),
        slots=slots,
        restarts=tuple(sorted((restarts.get("byCause") or {}).items())),
        uncounted=_uncounted(restarts),
        incidents=_list_incidents(incidents, {slot[0]: slot for slot in slots}),
        pods=_in_places(slots, sorted(_pod(pod, name) for pod in pods), size),
        ready="" if over else (status.get("world") or {}).get("summary", ""),
        marks=tuple(sorted(marks)),
        quarantines=tuple(
            sorted(
                (q["spec"]["verdict"], (q.get("status") or {}).get("state", ""))
                for q in quarantines
            )
        ),
    )


def _in_places(
    slots: Sequence[tuple[int, int, str]], pods: Sequence[Pod], size: int
) -> tuple[Pod, ...]:
    """Give spares the names of the empty places. Spares beyond these keep their own names."""
    own = {pod for pod in pods if int(pod[0].split("-")[0]) < size}
    with_pod = {int(name.split("-")[0]) for name, _, _ in own}
    empty = [f"{slot}-{attempt}" for slot, attempt, _ in slots if slot not in with_pod]
    spares = [pod for pod in pods if pod not in own]
    placed = [(place, *spare[1:]) for place, spare in zip(empty, spares, strict=False)]
    return tuple(sorted([*own, *placed, *spares[len(placed) :]]))


def _uncounted(restarts: Object) -> int:
    causes = restarts.get("byCause") or {}
    return int(restarts.get("total", 0)) - sum(causes.values())


def _list_incidents(
    incidents: Sequence[Object], slots: Mapping[int, tuple[int, int, str]]
) -> tuple[tuple[str, int, int, bool], ...]:
    """Count deaths that a quarantine explains as one move of their slot, even if a spare had taken its place by then
    and the move interrupted nothing.
    """
    found: list[tuple[str, int, int, bool]] = []
    mended: set[tuple[str, int]] = set()
    for i in incidents:
        slot = i.get("slot", -1)
        if _is_echo(i, incidents):
            continue
        if _is_explained(i) and slot in slots:
            if (i["quarantine"], slot) not in mended:
                _, attempt, cause = slots[slot]
                found.append((cause, slot, attempt - 1, False))
            mended.add((i["quarantine"], slot))
            continue
        found.append((i["cause"], slot, i.get("attempt", -1), i.get("open", False)))
    return tuple(found)


def _is_explained(incident: Object) -> bool:
    """Return whether the job had recovered from this death before a verdict on its node."""
    return "attempt" not in incident and not incident.get("open") and "quarantine" in incident


def _is_echo(incident: Object, incidents: Sequence[Object]) -> bool:
    """Return whether the incident is the death of a rank from a fault that later convicts its node.
    If the operator is dead in between, the job first recovers by itself. These are two
    interruptions, which the status must link by the quarantine.
    """
    if not _is_explained(incident):
        return False
    moved = [i for i in incidents if "attempt" in i and i["slot"] == incident.get("slot")]
    return any(i.get("quarantine") == incident["quarantine"] for i in moved)


def describe_difference(clean: Shape, found: Shape) -> str:
    """One line for each part that differs."""
    parts = [
        f"  {part}: {getattr(found, part)} instead of {getattr(clean, part)}"
        for part in Shape.__dataclass_fields__
        if getattr(found, part) != getattr(clean, part)
    ]
    return "\n".join(parts)


def mark_of(node: Object) -> tuple[bool, bool, bool]:
    taints = {t["key"] for t in node["spec"].get("taints") or []}
    return (
        bool(node["spec"].get("unschedulable")),
        names.TAINT_QUARANTINE in taints,
        OUR_MARK in (node["metadata"].get("annotations") or {}),
    )


def _conditions(status: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """`CheckpointHealthy` is kept only if it is False, because the progress of the first checkpoint is
    chance.
    """
    found = [(c["type"], c["status"], c["reason"]) for c in status.get("conditions", [])]
    kept = [c for c in found if c[0] in STEADY or (c[0] == "CheckpointHealthy" and c[1] == "False")]
    return tuple(sorted(kept))


def _pod(pod: Object, job: str) -> Pod:
    metadata = pod["metadata"]
    name = metadata["name"].removeprefix(f"{job}-")
    return name, pod.get("status", {}).get("phase", ""), "deletionTimestamp" in metadata
