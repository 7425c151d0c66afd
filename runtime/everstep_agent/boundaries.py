"""Armed boundaries: how all ranks come to do something at the same step without a message that
could be missed. Pure.

A boundary counts once every member's agent has acknowledged it while its worker's step is below it.
If a worker is past it, the coordinator raises it, further each time, since steps may be short
against a report's way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep_agent.messages import AgentReport, Boundary, EpochMember
from everstep_contract import levels

Id = tuple[int, int, int]
"""(slot, attempt, incarnation)"""


def arm(steps: Iterable[int], *, stay: bool, margin: int = 1) -> Boundary:
    """The first boundary that nobody can have passed by more than `margin` steps from now."""
    return Boundary(step=max(steps, default=0) + margin, stay=stay)


def advance(
    boundary: Boundary,
    members: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    *,
    raises: int,
) -> Boundary:
    """The same boundary, or confirmed, or raised; `raises` counts how often it was raised before."""
    if boundary.confirmed:
        return boundary
    by_id = {r.id: r for r in reports}
    held = [by_id.get(m.id) for m in members]
    passed = max((r.passed for r in held if r is not None), default=0)
    if passed >= boundary.step:
        return replace(boundary, step=passed + min(2**raises, 64))
    if all(r is not None and r.acked == boundary.step for r in held):
        return replace(boundary, confirmed=True)
    return boundary


def is_save_due(seconds: int, *, since_last: float, busy: bool) -> bool:
    """Whether an interval in seconds asks for a save now; steps need none of this, ranks compute
    them.
    """
    return seconds > 0 and not busy and since_last >= seconds


def why_stay(
    wanted: levels.Wanted,
    members: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    eligible: int,
    *,
    coordinator: Id,
) -> str:
    """Why the epoch should end at a boundary: Stop, Leave, Shrink, Grow, or nothing.

    An epoch ends with its coordinator, a member or not: it waits for the boundary like one.
    """
    if wanted.stop is not levels.Stop.NONE:
        return "Stop"
    slots = {m.slot for m in members} | {coordinator[0]}
    leaving = slots & {*wanted.leave, *list_told(members, reports, coordinator=coordinator)}
    if leaving:
        return "Shrink" if min(leaving) >= wanted.want_workers else "Leave"
    if len(members) < wanted.want_workers and eligible > 0:
        return "Grow"
    return ""


def list_told(
    members: Sequence[EpochMember], reports: Iterable[AgentReport], *, coordinator: Id
) -> dict[int, int]:
    """Slot → attempt of those whose agents were told to end (SIGTERM)."""
    ids = {m.id for m in members} | {coordinator}
    return {r.slot: r.attempt for r in reports if r.leaving and r.id in ids}


def describe_purpose(wanted: levels.Wanted, purpose: str, slots: Sequence[int]) -> str:
    """What an incident in order says of itself."""
    if purpose == "Grow":
        return "more slots are ready"
    names = ", ".join(map(str, slots))
    reason = wanted.leave_reason if wanted.leave else "its agent was told to end (SIGTERM)"
    return f"slot {names} leaves" + (f": {reason}" if reason else "")
