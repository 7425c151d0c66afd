"""Armed boundaries: how all ranks do something at the same step without a message that could get
lost. Pure.

A boundary takes effect once every member's agent has acknowledged it while its workers' steps were
below it. If a worker is already past the boundary, the coordinator raises it, each time by more,
because steps may be shorter than the latency of a report.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import Boundary, EpochLevel, EpochMember, Id
from everstep_contract import levels
from everstep_contract.wire import Standing


def arm(
    steps: Iterable[int],
    *,
    stay: bool,
    hold: bool = False,
    near: bool = False,
    margin: int = 1,
) -> Boundary:
    """A new boundary, `margin` steps ahead of the furthest worker."""
    return Boundary(step=max(steps, default=0) + margin, stay=stay, hold=hold, near=near)


def advance(
    boundary: Boundary,
    members: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    *,
    raises: int,
) -> Boundary:
    """The boundary unchanged, confirmed, or raised; `raises` counts how often it was raised before."""
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


def is_held_at(boundary: Boundary | None, standing: Standing | None) -> bool:
    """Whether a rank holds because newcomers join at this boundary, and not because it has failed
    to complete the step that ends there.
    """
    if boundary is None or standing is None:
        return False
    return boundary.hold and standing.applied == boundary.step


def is_save_due(seconds: int, *, since_last: float, busy: bool) -> bool:
    """Whether a save at an interval in seconds is due now. Intervals in steps need no coordinator:
    the ranks compute them.
    """
    return seconds > 0 and not busy and since_last >= seconds


def why_stay(
    wanted: levels.Wanted,
    members: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    eligible: int,
    *,
    coordinator: Id,
    returning: bool = False,
    waited: float = 0.0,
    gang: float = 0.0,
) -> str:
    """Why the epoch should end at a boundary: Stop, Leave, Shrink, Grow, or empty.

    The coordinator's own slot counts even if it is no member: if all ranks restart, an epoch ends
    with its coordinator, so the coordinator, too, leaves only at a boundary.

    Growing by a restart interrupts all ranks. A job that lost several slots to one fault therefore
    waits for all of them before it grows: at most `gang` seconds, of which `waited` have passed
    since the first slot was ready. `returning`: workers are ready to replace members' lost ranks in
    place, which restarts nobody.
    """
    if wanted.stop is not levels.Stop.NONE:
        return "Stop"
    slots = {m.slot for m in members} | {coordinator[0]}
    leaving = slots & {*wanted.leave, *list_terminating(members, reports, coordinator=coordinator)}
    if leaving:
        return "Shrink" if _is_surplus(leaving, members, wanted.want_workers) else "Leave"
    missing = wanted.want_workers - len(members)
    grows = missing > 0 and eligible > 0 and (eligible >= missing or waited >= gang)
    return "Grow" if grows or returning else ""


def _is_surplus(leaving: Collection[int], members: Sequence[EpochMember], want: int) -> bool:
    """Whether enough members remain without these slots. A slot's number does not show that if
    there are spares.
    """
    inside = {m.slot for m in members}
    return bool(inside & {*leaving}) and len(inside - {*leaving}) >= want


def is_resize(
    wanted: levels.Wanted,
    epoch: EpochLevel,
    reports: Iterable[AgentReport],
    lost: Collection[Id] = (),
) -> bool:
    """Whether members leave only because fewer are wanted, so that there is no loss to wait for.

    Args:
        lost: members whose pods are lost.
    """
    leaving = {m.id for m in epoch.members if m.slot in wanted.leave} | {*epoch.leaving}
    ended = {r.id for r in reports if any(w.state is State.DEAD for w in r.workers)}
    others = (ended & {m.id for m in epoch.members} | {*lost}) - {*epoch.leaving}
    slots = {slot for slot, _, _ in leaving}
    return _is_surplus(slots, epoch.members, wanted.want_workers) and not others


def why_renew(wanted: levels.Wanted, epoch: EpochLevel) -> str:
    """Why the epoch should be followed by one with the same members: Edit, or empty.

    Settings that all members must share cannot change within an epoch: otherwise ranks would save
    at different steps, or stop at different losses.
    """
    edited = (
        (wanted.save_every_steps, epoch.save_every_steps),
        (wanted.settings.guard_factor, epoch.guard_factor),
        (wanted.settings.guard_action, epoch.guard_action),
    )
    return "Edit" if any(new is not None and new != old for new, old in edited) else ""


def list_terminating(
    members: Sequence[EpochMember], reports: Iterable[AgentReport], *, coordinator: Id
) -> dict[int, int]:
    """Slot → attempt of the agents that received SIGTERM."""
    ids = {m.id for m in members} | {coordinator}
    return {r.slot: r.attempt for r in reports if r.leaving and r.id in ids}


def describe_purpose(purpose: str, slots: Sequence[int], reason: str) -> str:
    """The message of a planned incident. `reason`: why the slots leave."""
    if purpose == "Grow":
        return "more slots are ready"
    if purpose == "Edit":
        return "the job's settings were edited; the next epoch uses them"
    names = ", ".join(map(str, slots))
    return f"slot {names} leaves" + (f": {reason}" if reason else "")
