"""Which pods could join the running epoch, and their invitation."""

from collections.abc import Sequence

from everstep_agent.coordinator import join_rules, rounds
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport

LATE_SECONDS = 30.0
"""How long newcomers that are ready to join wait at least for others that are invited with them."""


def list_ready(term: Term) -> list[AgentReport]:
    return join_rules.list_ready(term.running, rounds.list_eligible(term.recent(), term.wanted))


def list_coming(term: Term, ready: Sequence[AgentReport]) -> frozenset[int]:
    """Slots whose pods are alive, are in no epoch, and will be ready soon."""
    epoch, known = term.running, {r.id for r in ready}
    eligible = rounds.list_eligible(term.recent(), term.wanted)
    outside = (r for r in eligible if r.id not in known and epoch.member(*r.id) is None)
    return frozenset(r.slot for r in outside if not (r.device_deaths or r.stuck or r.failure))


def invite_missing(term: Term, ready: Sequence[AgentReport]) -> bool:
    return invite(term, ready, term.wanted.want_workers - len(term.running.members))


def invite(term: Term, ready: Sequence[AgentReport], missing: int) -> bool:
    """Invite newcomers. Returns whether they are ready to join the running epoch. `missing`: how
    many other pods are wanted.
    """
    epoch = term.running
    joining = join_rules.plan_invitation(
        epoch, ready, missing=max(0, missing), coming=list_coming(term, ready)
    )
    if joining != epoch.joining:
        term.change(term.state.invite(joining))
        return False
    return join_rules.are_prepared(joining, term.recent())


def leave_out_late(term: Term, watch: Watch, now: float) -> bool:
    """If some newcomers are ready and the others are late, invite only those that are ready. The others
    are late after as long again as the first one took, and at least `LATE_SECONDS`. They have to get
    ready anew, and join at a later boundary. Returns whether newcomers can join now.
    """
    epoch = term.running
    prepared = join_rules.list_prepared(epoch, term.recent())
    watch.note_invited(invited=bool(epoch.joining), prepared=bool(prepared), now=now)
    if watch.invited_at is None or watch.prepared_at is None:
        return False
    took, waited = watch.prepared_at - watch.invited_at, now - watch.prepared_at
    if waited < max(LATE_SECONDS, took):
        return False
    late = ",".join(str(m.slot) for m in epoch.joining if m not in prepared)
    text = f"the others have been ready for {waited:.0f} s and join now; these join later"
    term.line.say("newcomers_late", slots=late, message=text)
    term.change(term.state.invite(prepared))
    return True


def may_claim_soon(term: Term) -> bool:
    """Whether an epoch with newcomers could be claimed at once. Nobody should hold while the store
    is unavailable.
    """
    away = term.store_waits.trouble or term.context.store.trouble
    return away is None and not term.running.unclaimed
