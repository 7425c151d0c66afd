"""Which pods could join the running epoch, and their invitation."""

from collections.abc import Sequence

from everstep_agent.coordinator import join_rules, rounds
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.agent_report import AgentReport


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


def may_claim_soon(term: Term) -> bool:
    """Whether an epoch with newcomers could be claimed at once. Nobody should hold while the store
    is unavailable.
    """
    away = term.store_waits.trouble or term.context.store.trouble
    return away is None and not term.running.unclaimed
