"""One turn of a running epoch's boundary: arm it, confirm it, raise it, or end the epoch at it.

The decisions are made in `boundaries.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep_agent.coordinator import (
    boundaries,
    join_rules,
    members,
    near_saves,
    regroup,
    rounds,
    unit_losses,
)
from everstep_agent.coordinator.gather import stop_here
from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.near_saves import NearSaves
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import Boundary, Id
from everstep_agent.peers.partners import choose_partners, list_places
from everstep_contract import levels, names

ARM_SECONDS = 60.0
"""Limit for all agents to acknowledge a boundary. They do so at once, however long a step takes."""
REPLACEMENT_SECONDS = 10.0
"""How long a member that may leave waits until the pod that takes its place is ready. Nobody waits
if a pod has received SIGTERM.
"""
PIN_SECONDS = 10.0
"""How long the staging of a save that carries a pin may take before another save is made for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A planned end of the epoch, recorded when its boundary was armed."""

    cause: Cause
    id: str
    """Empty: choose an id as for any incident."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """The state that the training loop keeps between two turns."""

    began: float
    """When the epoch began, or was continued in place."""
    save_at: float
    """When the last save at an armed boundary was done, or given up."""
    moved_at: float
    """When any rank's step last advanced."""
    armed_at: float = 0.0
    """When the present boundary was armed."""
    ready_at: float | None = None
    """Since when a pod has been ready to join; None: no pod is."""
    furthest: int = -1
    raises: int = 0
    purpose: str = ""
    """Why the armed boundary ends the epoch (`boundaries.why_stay`); empty: it only saves."""
    move: Move | None = None
    """The planned end, as long as it is not opened as an incident."""
    leave_at: int | None = None
    """The furthest worker's step when members were asked to leave in place; None: none is asked."""
    may_leave_at: float | None = None
    """Since when these members may leave; None: their state is not committed yet."""
    short_since: float | None = None
    """Since when the job has had fewer pods than its minimum; None: it has enough."""
    pin_at: float | None = None
    """From when on a save may be made for a pin; None: no pin is due."""
    near: NearSaves

    @classmethod
    def start(cls, now: float) -> "Watch":
        near = NearSaves(made_at=now)
        return cls(began=now, save_at=now, moved_at=now, armed_at=now, near=near)

    def renew(self, now: float) -> "Watch":
        """The watch for an epoch that continues in place: keeps what spans several such epochs."""
        return replace(
            Watch.start(now),
            save_at=self.save_at,
            short_since=self.short_since,
            pin_at=self.pin_at,
            near=self.near.renew(),
        )

    def short(self, is_short: bool, now: float) -> float:
        """Seconds since the job has had fewer pods than its minimum."""
        if not is_short:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now
        return 0.0 if self.short_since is None else now - self.short_since

    def idle(self, furthest: int, now: float) -> float:
        """Seconds since any rank's step last advanced."""
        if furthest != self.furthest:
            self.furthest, self.moved_at = furthest, now
        return now - self.moved_at


def settle(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
    """Take one turn. Returns whether the epoch is over at its boundary."""
    epoch = term.running
    boundary = epoch.boundary
    if boundary is None:
        _arm(term, watch, workers, now)
        return False
    _open_move(term, watch)
    if not (boundary.stay or boundary.hold):
        _invite_meanwhile(term, watch, now)
    moved = boundaries.advance(boundary, epoch.members, term.recent(), raises=watch.raises)
    if moved != boundary:
        watch.raises += moved.step != boundary.step
        term.change(term.state.arm(moved))
        return False
    if not boundary.confirmed:
        if now - watch.armed_at > ARM_SECONDS:
            _give_up(term, watch, boundary, now)
        return False
    if boundary.hold:
        return False  # `join.admit` ends it
    if boundary.stay:
        return _stay(term, watch, boundary, workers)
    if boundary.near:
        held = members.find_held(epoch, term.reports.all())
        over = held >= boundary.step or all(w.applied > boundary.step for w in workers)
    else:
        over = epoch.committed >= boundary.step or all(
            w.applied > boundary.step + 1 for w in workers
        )
    if over:
        _disarm(term, watch, boundary, now)
    return False


def _disarm(term: Term, watch: Watch, boundary: Boundary, now: float) -> None:
    if not boundary.near:
        watch.save_at = now
    watch.raises = 0
    term.change(term.state.disarm())


def _give_up(term: Term, watch: Watch, boundary: Boundary, now: float) -> None:
    """Drop the boundary, because an agent does not answer although the job may still step. The
    boundary's purpose is tried again.
    """
    acked = {r.id for r in term.recent() if r.acked == boundary.step}
    silent = ", ".join(str(m.slot) for m in term.running.members if m.id not in acked)
    text = (
        f"the ranks could not agree to save or stop at step {boundary.step}, because slot {silent} did not answer "
        f"within {ARM_SECONDS:.0f} s; Everstep tries again at a later step"
    )
    term.line.say("boundary_given_up", step=boundary.step, message=text)
    _disarm(term, watch, boundary, now)
    term.change(term.state.note(text))


def _arm(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> None:
    if not _all_answer(term):
        return  # it is unknown what silent members can do, and no boundary would be confirmed
    ready = _list_ready(term)
    in_place, purpose = _choose_purpose(term, watch, ready, now)
    if in_place and _leave_in_place(term, watch, workers, purpose, ready, now):
        return
    watch.leave_at = watch.may_leave_at = None
    if purpose not in levels.IN_ORDER or purpose == "Grow":
        _withdraw_move(term, purpose)
    joins = purpose == "Grow" and in_place
    if joins and not (_invite_missing(term, ready) and _may_claim_soon(term)):
        purpose, joins = "", False
    saves = purpose or _is_save_due(term, watch, now) or _is_pin_due(term, watch, now)
    if not saves:
        if _is_near_due(term, watch, workers, now):
            _arm_at(term, watch, workers, "", now, near=True)
        return
    # A worker that joins in place interrupts nobody: that is no incident.
    watch.move = None if joins else _describe_move(term, purpose, term.recent())
    _open_move(term, watch)
    _arm_at(term, watch, workers, purpose, now, hold=joins)


def _all_answer(term: Term) -> bool:
    return {m.id for m in term.running.members} <= {r.id for r in term.recent()}


def _choose_purpose(
    term: Term, watch: Watch, ready: Sequence[AgentReport], now: float
) -> tuple[bool, str]:
    """Whether newcomers can join and members leave in place, and why the epoch should end at a
    boundary (`boundaries.why_stay`). Notes in `watch` since when a pod has been ready.
    """
    epoch, recent = term.running, term.recent()
    others = join_rules.list_others(epoch, ready)
    in_place = bool(term.settings.in_place) and join_rules.can_join(epoch, recent)
    whole = epoch.slots_together * len(
        join_rules.list_blocks(epoch, ready, _list_coming(term, ready))
    )
    watch.ready_at = (watch.ready_at or now) if whole else None
    purpose = boundaries.why_stay(
        term.wanted,
        epoch.members,
        recent,
        whole,
        returning=in_place and len(others) < len(ready),
        coordinator=term.me.id,
        waited=now - (watch.ready_at or now),
        gang=0.0 if in_place else term.settings.gang_seconds,
    )
    return in_place, purpose or boundaries.why_renew(term.wanted, epoch)


def _invite_meanwhile(term: Term, watch: Watch, now: float) -> None:
    """Invite newcomers although a boundary is armed at which the ranks only save: they get ready
    until the save is done.
    """
    ready = _list_ready(term) if _all_answer(term) else []
    if ready and _choose_purpose(term, watch, ready, now) == (True, "Grow"):
        _invite_missing(term, ready)


def _list_ready(term: Term) -> list[AgentReport]:
    return join_rules.list_ready(term.running, rounds.list_eligible(term.recent(), term.wanted))


def _list_coming(term: Term, ready: Sequence[AgentReport]) -> frozenset[int]:
    """Slots whose pods are alive, are in no epoch, and will be ready soon."""
    epoch, known = term.running, {r.id for r in ready}
    eligible = rounds.list_eligible(term.recent(), term.wanted)
    outside = (r for r in eligible if r.id not in known and epoch.member(*r.id) is None)
    return frozenset(r.slot for r in outside if not (r.device_deaths or r.stuck or r.failure))


def _arm_at(
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
        watch.near.arm(armed.step, _count_stalled(term), now)
    term.line.say(
        "boundary_armed",
        step=armed.step,
        purpose=purpose or ("NearSave" if near else "Save"),
        incident=term.state.incidents.id,
    )
    term.change(term.state.arm(armed))


def list_leaving(term: Term) -> tuple[Id, ...]:
    """The members that are asked to leave, and those that cannot continue without them: the rest of
    their units, which stays ready and joins again.
    """
    members = term.running.members
    told = boundaries.list_terminating(members, term.recent(), coordinator=term.me.id)
    slots = {*told, *term.wanted.leave}
    return unit_losses.with_mates(term.running, [m.id for m in members if m.slot in slots])


def list_free_to_leave(term: Term, watch: Watch) -> tuple[Id, ...]:
    """The leaving members, if they may leave at the boundary at which others join; otherwise none.
    If all members are to leave, none does so here, because someone has to hand the state over.
    """
    leaving = list_leaving(term) if watch.may_leave_at is not None else ()
    return leaving if len(leaving) < len(term.running.members) else ()


def _leave_in_place(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    ready: Sequence[AgentReport],
    now: float,
) -> bool:
    """Let members leave while the others continue. Returns whether this is possible.

    All ranks save while they train. Once the save is committed, the leaving workers end, and the
    others continue as after a loss. If other pods are ready to take the leaving members' places,
    they join at the same time.
    """
    if purpose not in ("Leave", "Shrink") or regroup.why_not_wanted(term):
        return False
    leaving = list_leaving(term)
    if len(leaving) == len(term.running.members):
        return False
    if leaving:
        _let_leave(term, watch, workers, purpose, ready, now)
    # Else only the coordinator's own pod leaves, which is no member: `note_left` makes it hand over.
    return True


def _let_leave(
    term: Term,
    watch: Watch,
    workers: Sequence[WorkerReport],
    purpose: str,
    ready: Sequence[AgentReport],
    now: float,
) -> None:
    leaving = list_leaving(term)
    if watch.leave_at is None:
        watch.leave_at = max((w.applied for w in workers), default=0)
        watch.move = _describe_move(term, purpose, term.recent())
    _open_move(term, watch)
    replaced = not term.running.leaving and _replace(term, leaving, ready)
    if term.running.committed < max(1, watch.leave_at):
        if not _is_saving(term) and not _is_under_way(term, watch.leave_at):
            _arm_at(term, watch, workers, "", now)
        return
    watch.may_leave_at = watch.may_leave_at or now
    if replaced and _may_claim_soon(term):
        _arm_at(term, watch, workers, purpose, now, hold=True)
    elif term.running.leaving != leaving and not _awaits_replacement(term, watch, now):
        term.line.say("members_leave", slots=",".join(str(slot) for slot, _, _ in leaving))
        term.mark("drain")
        term.change(term.state.let_leave(leaving))


def _replace(term: Term, leaving: Sequence[Id], ready: Sequence[AgentReport]) -> bool:
    """Invite pods to take the places of `leaving`. Returns whether these are ready to join."""
    staying = len(term.running.members) - len(leaving)
    return _invite(term, ready, term.wanted.want_workers - staying)


def _awaits_replacement(term: Term, watch: Watch, now: float) -> bool:
    """Whether the members that may leave still wait for the pods that take their places."""
    told = boundaries.list_terminating(term.running.members, term.recent(), coordinator=term.me.id)
    since = watch.may_leave_at
    late = since is None or now - since > REPLACEMENT_SECONDS
    return bool(term.running.joining) and not told and not late and _may_claim_soon(term)


def _invite_missing(term: Term, ready: Sequence[AgentReport]) -> bool:
    return _invite(term, ready, term.wanted.want_workers - len(term.running.members))


def _invite(term: Term, ready: Sequence[AgentReport], missing: int) -> bool:
    """Invite newcomers. Returns whether they are ready to join the running epoch. `missing`: how
    many other pods are wanted.
    """
    epoch = term.running
    joining = join_rules.plan_invitation(
        epoch, ready, missing=max(0, missing), coming=_list_coming(term, ready)
    )
    if joining != epoch.joining:
        term.change(term.state.invite(joining))
        return False
    return join_rules.are_prepared(joining, term.recent())


def _may_claim_soon(term: Term) -> bool:
    """Whether an epoch with newcomers could be claimed at once. Nobody should hold while the store
    is unavailable.
    """
    away = term.store_waits.trouble or term.context.store.trouble
    return away is None and not term.running.unclaimed


def _is_save_due(term: Term, watch: Watch, now: float) -> bool:
    return boundaries.is_save_due(
        term.settings.save_every_seconds,
        since_last=now - watch.save_at,
        busy=_is_saving(term),
    )


def follow_near_saves(term: Term, watch: Watch, now: float) -> None:
    """Publish which near save is kept."""
    epoch, limit = term.running, term.settings.max_redo_seconds
    if not near_saves.is_wanted(epoch, limit):
        return
    reports = term.reports.all()
    partners = choose_partners(list_places(epoch.members, term.wanted.peers))
    copying = partners if term.settings.peer_bandwidth else ()
    kept = watch.near.follow(
        members.find_held(epoch, reports),
        members.find_copied(epoch, reports, copying),
        stalled=lambda: _count_stalled(term),
        limit=limit,
        now=now,
    )
    if kept > epoch.kept:
        term.change(term.state.keep(kept))


def _is_near_due(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
    epoch, limit = term.running, term.settings.max_redo_seconds
    every = epoch.save_every_steps
    furthest = max((w.applied for w in workers), default=0)
    steps = term.settings.save_every_steps if every is None else every
    soon = near_saves.is_save_near(furthest, steps)
    return near_saves.is_wanted(epoch, limit) and not soon and watch.near.is_due(limit, now)


def _count_stalled(term: Term) -> float:
    """Seconds for which saves have delayed each rank so far."""
    return term.spent().total().get("stall", 0.0) / max(1, term.running.world)


def want_pin(term: Term, workers: Sequence[WorkerReport]) -> None:
    """Let the checkpoint of any step that ends from now on carry the operator's pin."""
    if len(workers) == term.running.world:
        until = term.board.levels.seen.until
        following = max(w.applied for w in workers) + 1
        term.saves.pins.want(term.wanted.pin, following if until is None else min(following, until))


def _is_pin_due(term: Term, watch: Watch, now: float) -> bool:
    """Whether to arm a save for a pin, because no save that would carry it is under way. A pin that
    the script asks for comes with a save of the script's own, which is waited for first.
    """
    epoch, pins = term.running, term.saves.pins
    following = max(term.applied().values(), default=0) + 1
    due = pins.list_due(following, term.run_log.index)
    if not due:
        watch.pin_at = None
        return False
    if watch.pin_at is None:
        watch.pin_at = now if term.wanted.pin in due else now + PIN_SECONDS
    if _is_under_way(term, epoch.committed + 1) or _is_saving(term) or now < watch.pin_at:
        return False
    watch.pin_at = now + PIN_SECONDS
    return True


def _is_under_way(term: Term, step: int) -> bool:
    """Whether all ranks have staged this step, or a later one, and it may still be committed."""
    return term.staged >= step and not term.saves.why_given_up(term.running.number, term.staged)


def _is_saving(term: Term) -> bool:
    return term.saves.busy or bool(term.saves.pending(term.running.number))


def _describe_move(term: Term, purpose: str, recent: list[AgentReport]) -> Move | None:
    if purpose not in levels.IN_ORDER:
        return None
    told = boundaries.list_terminating(term.running.members, recent, coordinator=term.me.id)
    leaves = purpose not in ("Grow", "Edit")
    slots = tuple(sorted({*told, *term.wanted.leave})) if leaves else ()
    # The operator derives the same id when it sees the pod being deleted, so both report one
    # incident.
    by_signal = leaves and told and not term.wanted.leave
    message = boundaries.describe_purpose(term.wanted, purpose, slots)
    return Move(
        cause=Cause(name=purpose, message=message, slots=slots),
        id=names.incident_id("PodDeleted", slots[0], told[slots[0]]) if by_signal else "",
    )


def _open_move(term: Term, watch: Watch) -> None:
    """Open the planned end as an incident, once the recovery during which it was armed is over."""
    move = watch.move
    if move is None or term.state.incidents.current is not None:
        return
    term.open_incident(move.cause, id=move.id)
    term.change(term.state.name_incident())
    watch.move = None


def _withdraw_move(term: Term, purpose: str) -> None:
    """Close the incident of a planned end that is no longer wanted and that has not begun.

    Args:
        purpose: what is wanted now.
    """
    incidents = term.state.incidents
    level = incidents.current.level if incidents.current is not None else None
    if level is None or level.cause not in levels.IN_ORDER - {purpose} or level.phases:
        return
    withdrawn = Cause(name=level.cause, message="it was withdrawn before anybody stopped for it")
    term.line.say("move_withdrawn", incident=level.id, cause=level.cause)
    closed = incidents.explain(withdrawn, since=None).close()
    term.change(term.state.with_incidents(closed).name_incident())


def _stay(term: Term, watch: Watch, boundary: Boundary, workers: Sequence[WorkerReport]) -> bool:
    """End the epoch once all ranks are parked at the boundary and their save is committed. Returns
    whether the epoch is over.
    """
    if not all(w.state in (State.PARKED, State.FINISHED) for w in workers):
        return False
    term.mark("boundary")
    if term.running.committed < boundary.step:
        return False
    incidents = term.state.incidents.mark("commit", term.now()).resumes(boundary.step, 0)
    term.group.open_epoch(0)
    term.change(term.state.with_incidents(incidents).end_epoch(watch.purpose))
    term.line.say(
        "epoch_over", epoch=term.running.number, step=boundary.step, purpose=watch.purpose
    )
    term.note_left()
    if term.wanted.stop is not levels.Stop.NONE:
        stop_here(term)
    return True
