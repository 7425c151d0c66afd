"""Which pods could join the running epoch, and their invitation."""

from collections.abc import Sequence

from everstep_agent.coordinator import join_rules, rounds, stalled_joins
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochMember

LATE_SECONDS = 30.0
"""How long newcomers have at least to get ready, and others that are ready wait for them."""


def list_ready(term: Term, now: float) -> list[AgentReport]:
    return join_rules.list_ready(term.running, _list_able(term, now))


def _list_able(term: Term, now: float) -> list[AgentReport]:
    """The pods that may join, without those that wait because a join has failed."""
    waiting = stalled_joins.list_waiting(term.state.failed_joins, now)
    return [r for r in rounds.list_eligible(term.recent(), term.wanted) if r.id[:2] not in waiting]


def list_coming(
    term: Term, watch: Watch, ready: Sequence[AgentReport], now: float
) -> frozenset[int]:
    """Slots whose pods are alive, are in no epoch, and will be ready soon: nobody waits for one longer than
    `gang_seconds`. Notes in `watch` since when each is expected.
    """
    epoch, known = term.running, {r.id for r in ready}
    able = _list_able(term, now)
    outside = (r for r in able if r.id not in known and epoch.member(*r.id) is None)
    slots = [r.slot for r in outside if not (r.device_deaths or r.stuck or r.failure)]
    watch.coming = {slot: watch.coming.get(slot, now) for slot in slots}
    limit = term.settings.gang_seconds
    return frozenset(slot for slot, since in watch.coming.items() if now - since < limit)


def invite_missing(term: Term, watch: Watch, ready: Sequence[AgentReport], now: float) -> bool:
    missing = term.wanted.want_workers - len(term.running.members)
    return invite(term, watch, ready, missing, now)


def invite(
    term: Term, watch: Watch, ready: Sequence[AgentReport], missing: int, now: float
) -> bool:
    """Invite newcomers. Returns whether they are ready to join the running epoch. `missing`: how
    many other pods are wanted.
    """
    epoch = term.running
    prepared = join_rules.list_prepared(epoch, term.recent())
    watch.note_prepared(prepared, now)
    late = [m for m in watch.list_late(prepared, now) if epoch.member(*m.id) is None]
    joining = join_rules.plan_invitation(
        epoch,
        ready,
        missing=max(0, missing),
        coming=list_coming(term, watch, ready, now),
        late=late,
    )
    watch.note_invited(joining, now, LATE_SECONDS)
    if joining != epoch.joining:
        _say_late(term, watch, [m for m in late if m in joining], joining, now)
        term.change(term.state.invite(joining))
        return False
    return join_rules.are_prepared(joining, term.recent())


def withdraw(term: Term) -> None:
    """Withdraw the invitation of pods that cannot join.

    There may be no place for them any more: fewer are wanted, or the member that was to leave stays. As long as they
    are invited, they are no spares, and the next loss would find none that is ready. Or a process of their unit has
    ended: the others would wait for it, up to the limit for forming a group (300 s).
    """
    epoch = term.running
    full = len(epoch.members) >= term.wanted.want_workers
    broken = join_rules.list_broken(epoch, term.recent())
    gone = [m for m in epoch.joining if epoch.member(*m.id) is None and (full or m.id in broken)]
    if gone:
        why = "the job has its size" if full else "a worker of these pods has ended"
        term.line.say("invitation_withdrawn", slots=_name(gone), message=why)
        term.change(term.state.invite(tuple(m for m in epoch.joining if m not in gone)))


def _say_late(
    term: Term,
    watch: Watch,
    late: Sequence[EpochMember],
    joining: Sequence[EpochMember],
    now: float,
) -> None:
    """Say which pods get ready because others are late."""
    epoch = term.running
    new = [m for m in joining if m not in epoch.joining and epoch.member(*m.id) is None]
    if not (late and new):
        return
    waited = max(now - watch.invited[m].at for m in late)
    text = (
        f"slot {_name(late)} is not ready to join after {waited:.0f} s, so slot {_name(new)} gets ready, too; those "
        f"that are ready first join. If slot {_name(late)} is usually faster, check its log, its GPU and its node"
    )
    term.line.say("newcomers_late", slots=_name(late), message=text)
    term.change(term.state.note(text))


def _name(newcomers: Sequence[EpochMember]) -> str:
    return ", ".join(str(m.slot) for m in newcomers)


def leave_out_late(term: Term, watch: Watch, now: float) -> bool:
    """If some newcomers are ready and the others are late, invite only those that are ready. The others
    are late after as long again as the first one took, and at least `LATE_SECONDS`. They have to get
    ready anew, and join at a later boundary. Returns whether newcomers can join now.
    """
    epoch = term.running
    prepared = join_rules.list_prepared(epoch, term.recent())
    late = [m for m in epoch.joining if m not in prepared]
    if not (prepared and late) or watch.prepared_at is None:
        return False
    waited = now - watch.prepared_at
    if waited < max(LATE_SECONDS, watch.took):
        return False
    text = f"the others have been ready for {waited:.0f} s and join now; these join later"
    term.line.say("newcomers_late", slots=_name(late), message=text)
    term.change(term.state.invite(prepared))
    return True


def may_claim_soon(term: Term) -> bool:
    """Whether an epoch with newcomers could be claimed at once. Nobody should hold while the store
    is unavailable.
    """
    away = term.store_waits.trouble or term.context.store.trouble
    return away is None and not term.running.unclaimed
