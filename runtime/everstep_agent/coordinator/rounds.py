"""When the next epoch starts, and with which members. Pure.

An epoch starts with agents whose workers have left their old group and are ready. Ranks follow slot
order, unit by unit (`form_units`). The round waits `gang_seconds` for the wanted size, and then
starts with fewer members if they are enough. The epoch's ranks form whole units. If more pods are
ready, the rest are spares: pods in no epoch, which take the place of lost ones. An agent may not
join if it is declared dead or gone, if its attempt is not its slot's current one, or if it is
leaving.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep_agent.coordinator.kept_out import find_kept_out, is_left_empty, list_kept_out
from everstep_agent.coordinator.pod_status import PodStatus, read_pod_status
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.peers.places import place_members
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import levels, log
from everstep_contract.units import ONE_RANK, Mesh, form_units


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
    reports: Iterable[AgentReport],
    wanted: levels.Wanted,
    *,
    round: int,
    waited: float,
    gang: float,
    former: Collection[tuple[int, int]] = (),
    mesh: Mesh = ONE_RANK,
) -> Decision:
    """`waited`: seconds since the round was opened; `gang`: how long to wait for the wanted size;
    `former`: (slot, attempt) of the newest claim's members, whose memory holds their saves.
    """
    joined = [
        r for r in list_eligible(reports, wanted) if r.joined == round and r.fresh and all(r.fresh)
    ]
    together = max((mesh.count_slots(len(r.fresh)) for r in joined), default=1)
    want = max(together, _round_down(wanted.want_workers, together))
    least = max(1, wanted.min_workers)
    have, whole = len(joined), _round_down(len(joined), together)
    if have >= want:
        chosen = _choose(joined, want, together, former)
        return _start(chosen, together, f"all {want} slots are ready")
    missing = f"{have} of {want} slots are ready"
    if whole < have:
        missing += f", {whole} of them in whole units"
    if whole < least:
        return Wait(reason="TooFewWorkers", message=f"{missing}; at least {least} are needed")
    if waited < gang:
        return Wait(
            reason="WaitingForGang",
            message=f"{missing}; starting smaller in {gang - waited:.0f} s",
        )
    chosen = _choose(joined, whole, together, former)
    return _start(chosen, together, f"{missing} after {waited:.0f} s; {least} are enough")


def _round_down(slots: int, together: int) -> int:
    """Round down to whole units."""
    return slots - slots % together


def _choose(
    joined: Sequence[AgentReport],
    want: int,
    together: int,
    former: Collection[tuple[int, int]],
) -> list[AgentReport]:
    """Whole units: first those of which the most pods trained before, then the lowest slots."""
    by_slot = {r.slot: r for r in joined}
    trained = {r.slot for r in joined if r.id[:2] in former}
    units = form_units(by_slot, together)
    units.sort(key=lambda unit: (-len(trained.intersection(unit)), unit))
    return [by_slot[slot] for unit in units[: want // together] for slot in unit]


def list_eligible(reports: Iterable[AgentReport], wanted: levels.Wanted) -> list[AgentReport]:
    """The agents that may join an epoch, by slot; of two attempts of a slot, the newer."""
    newest: dict[int, AgentReport] = {}
    for report in sorted(reports, key=lambda r: (r.slot, r.attempt, r.incarnation)):
        newest[report.slot] = report
    pods = read_pod_status(wanted)
    return [r for _, r in sorted(newest.items()) if not _why_not(r, wanted, pods)]


def _why_not(report: AgentReport, wanted: levels.Wanted, pods: PodStatus) -> str:
    """Why this agent may not join an epoch; empty if it may."""
    if report.leaving or report.slot in wanted.leave:
        return "leaving"
    if report.slot in wanted.hold:
        return "its node is suspect"
    if pods.is_gone(report.slot, report.attempt):
        return "declared gone"
    if pods.is_dead(*report.id):
        return "its container terminated"
    if pods.is_replaced(report.slot, report.attempt):
        return "a newer attempt of its slot is current"
    return ""


def list_spares(
    epoch: EpochLevel | None, reports: Iterable[AgentReport], wanted: levels.Wanted
) -> list[AgentReport]:
    """The pods that could join the running epoch at once, and are neither in it nor invited."""
    if epoch is None or epoch.stage is not Stage.RUNNING:
        return []
    known = {m.slot for m in (*epoch.members, *epoch.joining)}
    outside = (r for r in reports if r.slot not in known and r.fresh and all(r.fresh))
    return list_eligible(outside, wanted)


def _start(chosen: Sequence[AgentReport], together: int, message: str) -> Start:
    members = place_members((to_member(r, r.fresh) for r in chosen), together)
    return Start(members=members, reason="Ready", message=message)


def to_member(report: AgentReport, lives: tuple[int, ...]) -> EpochMember:
    """The member, before it is placed among the others."""
    return EpochMember(
        slot=report.slot,
        attempt=report.attempt,
        incarnation=report.incarnation,
        node_rank=0,
        first=0,
        lives=lives,
        address=report.address,
    )


def build_proof(
    claim: log.Claim | None,
    reports: Iterable[AgentReport],
    wanted: levels.Wanted,
    yields: Iterable[levels.Yield] = (),
) -> runlog_rules.Proof:
    """What is known about the end of the newest claim's members, and which of them may be left out
    without such proof.
    """
    by_id: Mapping[tuple[int, int, int], AgentReport] = {r.id: r for r in reports}
    return runlog_rules.Proof(
        dead=list_ended(claim.members if claim else (), by_id.values()),
        dead_agents=frozenset((d.slot, d.attempt, d.incarnation) for d in wanted.dead)
        | frozenset((r.slot, r.attempt, r.incarnation - 1) for r in by_id.values()),
        gone=frozenset((g.slot, g.attempt) for g in wanted.gone)
        | frozenset((p.slot, p.attempt - 1) for p in wanted.peers),
        yields=frozenset((y.slot, y.attempt, y.epoch) for y in yields),
    )


def list_ended(
    members: Iterable[log.MemberId], reports: Iterable[AgentReport]
) -> frozenset[log.MemberId]:
    """Those of `members` whose own agents reported their ends."""
    ended: dict[tuple[int, int, int, int], int] = {}
    for report in reports:
        for end in report.ended:
            place = *report.id, end.local
            ended[place] = max(end.life, ended.get(place, -1))
    places = {m: (m.slot, m.attempt, m.incarnation, m.rank) for m in members}
    return frozenset(m for m, place in places.items() if ended.get(place, -1) >= m.life)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Why a coordinator that knows of no epoch gathers one; `cause` Start: nothing was lost."""

    cause: str
    message: str = ""


def decide_beginning(
    claim: log.Claim | None, mine: AgentReport | None, wanted: levels.Wanted, *, job_uid: str
) -> Beginning:
    """`mine`: the report of the coordinator's own agent."""
    if claim is None or claim.job_uid != job_uid:
        return Beginning(cause="Start")
    if mine is not None and mine.former_epoch == claim.epoch:
        why = "; ".join(sorted({d.reason for d in wanted.dead if d.reason}))
        text = f"every agent of epoch {claim.epoch} was restarted" + (f" ({why})" if why else "")
        return Beginning(cause="AgentLost", message=text)
    if wanted.incident:
        text = f"every slot of epoch {claim.epoch} continues in a new pod"
        return Beginning(cause="Replaced", message=text)
    return Beginning(cause="Start")


def find_unheard(
    reports: Iterable[AgentReport], known: EpochLevel | None, claim: log.Claim | None
) -> EpochLevel | None:
    """The claimed epoch, if workers of it are alive and this coordinator did not know of it.
    Otherwise the epoch of workers that cannot enter the claimed one (`kept_out.py`).
    """
    told = list(reports)
    if claim is None:
        return None
    for held in (r.held for r in told if r.held is not None):
        if (known is None or held.number > known.number) and held.follows(claim):
            return held
    return find_kept_out(told, known, claim)


def is_behind(
    reports: Iterable[AgentReport], known: EpochLevel | None, claim: log.Claim | None
) -> bool:
    """Whether an agent was in a newer epoch than this coordinator knows of, and may hold the only
    copy of its state.
    """
    number = known.number if known else 0
    return any(r.epoch > number and not is_left_empty(r, known, claim) for r in reports)


def list_unheard(
    claim: log.Claim | None,
    known: int,
    reports: Iterable[AgentReport],
    wanted: levels.Wanted,
    *,
    job_uid: str,
) -> frozenset[tuple[int, int]]:
    """(slot, attempt) of pods that may hold state of an epoch that this coordinator does not know
    of.

    If the claimed epoch is later than `known`: its members that may still hold its state, because
    only their agents can report it. Otherwise: all pods that report that they are in a later epoch,
    which need not be claimed yet, or kept out of the claimed one.
    """
    told = list(reports)
    if claim is None or claim.job_uid != job_uid or claim.epoch <= known:
        pods = read_pod_status(wanted)
        later = [r for r in told if _holds(r, known + 1)]
        if claim is not None and claim.job_uid == job_uid:
            later += list_kept_out(told, claim)
        return frozenset(r.id[:2] for r in later if not pods.is_gone(*r.id[:2]))
    by_id = {r.id: r for r in told}
    newest = {(r.slot, r.attempt): r.incarnation for r in sorted(told, key=lambda r: r.id)}
    outside = {r.id for r in list_kept_out(told, claim) if r.epoch != known}
    pods, found = read_pod_status(wanted), set()
    for m in claim.members:
        place = m.slot, m.attempt
        over = pods.is_gone(*place) or pods.is_replaced(*place)
        dead = pods.is_dead(*place, m.incarnation) or newest.get(place, 0) > m.incarnation
        if over or dead:
            continue
        ident = m.slot, m.attempt, m.incarnation
        if ident in outside or _may_hold(by_id.get(ident), claim.epoch):
            found.add(place)
    return frozenset(found)


ReportedEpoch = tuple[tuple[int, int, int], int]
"""((slot, attempt, incarnation), epoch)"""


def list_reported(
    unheard: Collection[tuple[int, int]], reports: Iterable[AgentReport]
) -> frozenset[ReportedEpoch]:
    """Which of these pods have reported, and from which epoch. An agent that has just begun to
    follow this coordinator sends the epoch that it holds only after it has read that this
    coordinator does not know of that epoch.
    """
    return frozenset((r.id, r.epoch) for r in reports if (r.slot, r.attempt) in unheard)


def _may_hold(report: AgentReport | None, epoch: int) -> bool:
    return report is None or _holds(report, epoch) or not _is_from_epoch(report, epoch)


def _holds(report: AgentReport, epoch: int) -> bool:
    return report.epoch >= epoch and any(w.state is not State.DEAD for w in report.workers)


def _is_from_epoch(report: AgentReport, epoch: int) -> bool:
    """Whether the report was made after the epoch, or by an agent that can no longer start it.
    Otherwise the report may be older than the claim.
    """
    return report.epoch >= epoch or report.cut >= epoch or report.joined > epoch


def count_lost(reports: Iterable[AgentReport], epoch: int, step: int) -> int:
    """Steps after `step` that workers of terminated containers had applied in that epoch."""
    furthest = max((r.former_step for r in reports if r.former_epoch == epoch), default=0)
    return max(0, furthest - step)


def next_number(log_epoch: int, reports: Iterable[AgentReport], burnt: int) -> int:
    """A number higher than any epoch that was ever entered, joined, claimed or given up."""
    return 1 + max([log_epoch, burnt, *(max(r.joined, r.epoch) for r in reports)])


def choose_number(number: int, log_epoch: int, reports: Iterable[AgentReport], burnt: int) -> int:
    """The number of the present round: the same, or a higher one if it is used up, or if an agent
    has joined a later round (of a rival coordinator that is gone) and would never join this one.
    """
    told = list(reports)
    passed = max([log_epoch, burnt, *(max(r.joined, r.epoch) - 1 for r in told)])
    return next_number(log_epoch, told, burnt) if number <= passed else number


def count_repeats(claims: Sequence[log.Claim], cause: str, failed: int, fault: str = "") -> int:
    """How many of the newest claims in a row were made because this fault occurred in this step.

    The step from which they continued does not matter: a rank may be one step behind the one that
    failed.
    """
    count = 0
    for claim in reversed(claims):
        if (claim.cause, claim.failed, claim.fault) != (cause, failed, fault):
            break
        count += 1
    return count
