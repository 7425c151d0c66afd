"""When the next epoch starts, and of whom. Pure.

An epoch starts with agents whose workers have left their old group and are ready; ranks follow slot
order. It waits for the wanted size as long as `gang_seconds`, then starts with what is there if
that is enough. Nobody joins who is declared dead or gone, whose attempt is not its slot's current
one, or who is leaving.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep_agent import runlog_rules
from everstep_agent.messages import AgentReport, EpochLevel, EpochMember, State
from everstep_contract import levels, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    members: tuple[EpochMember, ...]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    reason: str
    message: str


Decision = Start | Wait


def decide_epoch(
    reports: Iterable[AgentReport], wanted: levels.Wanted, *, round: int, waited: float, gang: float
) -> Decision:
    """`waited`: seconds since the round was opened; `gang`: how long to wait for the wanted size."""
    joined = [r for r in list_eligible(reports, wanted) if r.joined == round and r.fresh]
    have, want = len(joined), max(1, wanted.want_workers)
    if have >= want:
        return _start(joined[:want], f"all {want} slots are ready")
    least = max(1, wanted.min_workers)
    missing = f"{have} of {want} slots are ready"
    if have < least:
        return Wait(reason="TooFewWorkers", message=f"{missing}; at least {least} are needed")
    if waited < gang:
        return Wait(
            reason="WaitingForGang",
            message=f"{missing}; starting smaller in {gang - waited:.0f} s",
        )
    return _start(joined, f"{missing} after {waited:.0f} s; {least} are enough")


def list_eligible(reports: Iterable[AgentReport], wanted: levels.Wanted) -> list[AgentReport]:
    """By slot; of two attempts of a slot the newer."""
    newest: dict[int, AgentReport] = {}
    for report in sorted(reports, key=lambda r: (r.slot, r.attempt, r.incarnation)):
        newest[report.slot] = report
    return [r for _, r in sorted(newest.items()) if not why_not(r, wanted)]


def why_not(report: AgentReport, wanted: levels.Wanted) -> str:
    """Why this agent may not be in an epoch; empty if it may."""
    if report.leaving or report.slot in wanted.leave:
        return "leaving"
    if report.slot in wanted.hold:
        return "its node is under suspicion"
    if is_gone(report.slot, report.attempt, wanted):
        return "declared gone"
    if any(
        d.slot == report.slot
        and d.attempt == report.attempt
        and d.incarnation >= report.incarnation
        for d in wanted.dead
    ):
        return "its container terminated"
    current = current_attempt(report.slot, wanted)
    if current is not None and report.attempt < current:
        return f"attempt {current} is current"
    return ""


def is_gone(slot: int, attempt: int, wanted: levels.Wanted) -> bool:
    return any(g.slot == slot and g.attempt >= attempt for g in wanted.gone)


def current_attempt(slot: int, wanted: levels.Wanted) -> int | None:
    return max((p.attempt for p in wanted.peers if p.slot == slot), default=None)


def _start(joined: Sequence[AgentReport], message: str) -> Start:
    members = tuple(
        EpochMember(
            slot=r.slot,
            attempt=r.attempt,
            incarnation=r.incarnation,
            node_rank=i,
            lives=r.fresh,
            address=r.address,
        )
        for i, r in enumerate(joined)
    )
    return Start(members=members, reason="Ready", message=message)


def build_proof(
    claim: log.Claim | None,
    reports: Iterable[AgentReport],
    wanted: levels.Wanted,
    remembered: Iterable[log.MemberId] = (),
) -> runlog_rules.Proof:
    """What is known about the death of the newest claim's members."""
    by_id: Mapping[tuple[int, int, int], AgentReport] = {r.id: r for r in reports}
    dead = set(remembered)
    for member in claim.members if claim else ():
        report = by_id.get((member.slot, member.attempt, member.incarnation))
        if report and any(e.local == member.rank and e.life >= member.life for e in report.ended):
            dead.add(member)
    return runlog_rules.Proof(
        dead=frozenset(dead),
        dead_agents=frozenset((d.slot, d.attempt, d.incarnation) for d in wanted.dead)
        | frozenset((r.slot, r.attempt, r.incarnation - 1) for r in by_id.values()),
        gone=frozenset((g.slot, g.attempt) for g in wanted.gone)
        | frozenset((p.slot, p.attempt - 1) for p in wanted.peers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Why a coordinator that has heard of no epoch gathers one; `cause` Start: nothing was lost."""

    cause: str
    message: str = ""


def decide_beginning(
    claim: log.Claim | None, mine: AgentReport | None, wanted: levels.Wanted, *, job_uid: str
) -> Beginning:
    """`mine`: the report of the coordinator's own agent."""
    if claim is None or claim.job_uid != job_uid:
        return Beginning(cause="Start")
    if mine is not None and mine.former_epoch == claim.epoch:
        text = f"every agent of epoch {claim.epoch} was started again"
        return Beginning(cause="AgentLost", message=text)
    if wanted.incident:
        text = f"every slot of epoch {claim.epoch} goes on in a new pod"
        return Beginning(cause="Replaced", message=text)
    return Beginning(cause="Start")


def find_unheard(
    reports: Iterable[AgentReport], known: EpochLevel | None, claim: log.Claim | None
) -> EpochLevel | None:
    """The claimed epoch of workers that still live, which this coordinator has not heard of."""
    for report in reports:
        held = report.held
        newer = held is not None and (known is None or held.number > known.number)
        if newer and held is not None and claim is not None and held.token == claim.token:
            return held
    return None


def list_unheard(
    claim: log.Claim | None,
    known: int,
    reports: Iterable[AgentReport],
    wanted: levels.Wanted,
    *,
    job_uid: str,
) -> frozenset[tuple[int, int]]:
    """(slot, attempt) of the claimed epoch's members that may still hold its state, for a coordinator
    that has heard of no epoch after `known`: only their agents can tell.
    """
    if claim is None or claim.job_uid != job_uid or claim.epoch <= known:
        return frozenset()
    told = list(reports)
    by_id = {r.id: r for r in told}
    newest = {(r.slot, r.attempt): r.incarnation for r in sorted(told, key=lambda r: r.id)}
    found = set()
    for m in claim.members:
        place = m.slot, m.attempt
        current = current_attempt(m.slot, wanted)
        over = is_gone(*place, wanted) or (current is not None and current > m.attempt)
        dead = any(
            (d.slot, d.attempt) == place and d.incarnation >= m.incarnation for d in wanted.dead
        )
        if over or dead or newest.get(place, 0) > m.incarnation:
            continue
        held = by_id.get((m.slot, m.attempt, m.incarnation))
        if held is None or _holds(held, claim.epoch) or not _tells_of(held, claim.epoch):
            found.add(place)
    return frozenset(found)


Spoken = tuple[tuple[int, int, int], int]
"""((slot, attempt, incarnation), epoch)"""


def list_spoken(
    unheard: Collection[tuple[int, int]], reports: Iterable[AgentReport]
) -> frozenset[Spoken]:
    """Which of these have spoken, and of which epoch: who has just come over to us sends the level that it holds
    only when it has heard that we do not know of it.
    """
    return frozenset((r.id, r.epoch) for r in reports if (r.slot, r.attempt) in unheard)


def _holds(report: AgentReport, epoch: int) -> bool:
    return report.epoch == epoch and any(w.state is not State.DEAD for w in report.workers)


def _tells_of(report: AgentReport, epoch: int) -> bool:
    """Whether it is from after the epoch, or from somebody who can no longer begin it: it may be older than the
    claim.
    """
    return report.epoch >= epoch or report.cut >= epoch or report.joined > epoch


def count_lost(reports: Iterable[AgentReport], epoch: int, step: int) -> int:
    """Steps after `step` that workers of ended containers had applied in that epoch."""
    furthest = max((r.former_step for r in reports if r.former_epoch == epoch), default=0)
    return max(0, furthest - step)


def next_number(log_epoch: int, reports: Iterable[AgentReport], burnt: int) -> int:
    """Higher than any epoch that anybody was in, joined, claimed or gave up."""
    return 1 + max([log_epoch, burnt, *(max(r.joined, r.epoch) for r in reports)])


def choose_number(number: int, log_epoch: int, reports: Iterable[AgentReport], burnt: int) -> int:
    """The number of the round that is gathered: the same, or a higher one once it is used up or somebody
    has joined a later round (of a rival that is gone by now) and would never join this one.
    """
    told = list(reports)
    passed = max([log_epoch, burnt, *(max(r.joined, r.epoch) - 1 for r in told)])
    return next_number(log_epoch, told, burnt) if number <= passed else number


def count_repeats(claims: Sequence[log.Claim], cause: str, failed: int) -> int:
    """How often in a row the newest claims were made because this cause struck in this step.

    Where they went on from does not count: a rank may be a step behind the one that failed.
    """
    count = 0
    for claim in reversed(claims):
        if (claim.cause, claim.failed) != (cause, failed):
            break
        count += 1
    return count
