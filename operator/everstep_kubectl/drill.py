"""A rehearsed fault: whether it is allowed, on which pod, and how it ended. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract import names
from everstep_kubectl import jobs, timeline
from everstep_kubectl.incidents import Incident

Raw = Mapping[str, Any]
ANNOTATION = f"{names.GROUP}/drill"
ALLOWED = "allowed"
SUDDEN_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    pod: str
    uid: str
    slot: int
    attempt: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    message: str


def plan_drill(job: Raw, slot: int | None) -> Target | Refused:
    """Choose the pod. A job in trouble gets no drill, which would prove nothing and could lose
    steps.
    """
    name, meta = job["metadata"]["name"], job["metadata"]
    status = job.get("status") or {}
    if (meta.get("annotations") or {}).get(ANNOTATION) != ALLOWED:
        return Refused(
            message=f"{name} has not opted in: kubectl annotate rtj -n {meta['namespace']} {name} "
            f"{ANNOTATION}={ALLOWED}"
        )
    if end := jobs.find_end(job):
        return Refused(message=f"{name} is {end}: a drill needs a job that runs")
    if not jobs.is_true(job, "Running") or jobs.is_true(job, "Recovering"):
        state = status.get("state") or jobs.NEW
        return Refused(message=f"{name} is {state}: a drill needs a job that runs")
    if (health := jobs.condition(job, "CheckpointHealthy")) and health["status"] == "False":
        return Refused(message=f"{name} is not safe now: {health['reason']}: {health['message']}")
    if not status.get("checkpoint"):
        return Refused(message=f"{name} has no checkpoint yet: wait for the first one")
    spares = {int(s) for s in (status.get("spares") or {}).get("slots") or ()}
    return _choose(name, status.get("slots") or [], spares, slot)


def _choose(
    name: str, slots: Sequence[Raw], spares: Collection[int], wanted: int | None
) -> Target | Refused:
    """`spares`: slots whose loss interrupts nothing."""
    known = {int(s["slot"]): s for s in slots}
    able = [slot for slot, s in known.items() if s.get("podUid") and slot not in spares]
    slot = max(able, default=max(known, default=-1)) if wanted is None else wanted
    if slot not in known:
        return Refused(message=f"{name} has no slot {slot}; it has {sorted(known)}")
    if slot in spares:
        return Refused(
            message=f"slot {slot} is a spare: its loss interrupts nothing; choose one of {sorted(able)}"
        )
    if slot not in able:
        return Refused(message=f"the pod of slot {slot} was not seen yet: try again")
    attempt = int(known[slot]["attempt"])
    return Target(
        pod=names.pod_name(name, slot, attempt),
        uid=str(known[slot]["podUid"]),
        slot=slot,
        attempt=attempt,
        node=str(known[slot].get("node") or ""),
    )


def build_delete(target: Target, *, sudden: bool) -> dict[str, Any]:
    """DeleteOptions that match only this pod, and no other pod of its name."""
    options: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": target.uid},
    }
    return options | ({"gracePeriodSeconds": SUDDEN_SECONDS} if sudden else {})


def find_incident(found: Sequence[Incident], before: frozenset[str], slot: int) -> Incident | None:
    """The incident that the drill caused: it is new, and the drill's slot is among those that
    moved.
    """
    new = [i for i in found if i.id not in before]
    return next((i for i in reversed(new) if slot in i.slots), None)


def is_recovered(job: Raw, target: Target, incident: Incident | None) -> bool:
    """Whether the slot has a newer attempt and the job has stepped beyond the resume point."""
    status = job.get("status") or {}
    attempts = {int(s["slot"]): int(s["attempt"]) for s in status.get("slots") or ()}
    if incident is None or incident.open or attempts.get(target.slot, 0) <= target.attempt:
        return False
    steps = int(status.get("step") or 0) > (incident.checkpoint_step or 0)
    return steps and jobs.is_true(job, "Running") and not jobs.is_true(job, "Recovering")


def render_result(job: Raw, incident: Incident, *, sudden: bool, now: float) -> str:
    name = job["metadata"]["name"]
    lost = incident.cost.steps_lost or 0
    word = "passed: no step was lost" if lost == 0 else f"recovered, but {lost} steps were lost"
    if lost and sudden:
        word += " (no surviving rank held the state)"
    shown = timeline.render(name, [incident], whole=True, now=now)
    return f"{shown}\n\ndrill {word}"
