"""What the operator accepts from the answers of a job's agents, and which agents it asks. Pure.

An answer counts in full only if it is proven: its sender has the job's token. A dead pod's
address may belong to another pod by now, and a forged answer could end the job (`done`) or have
its pods deleted (`left`).

An answer without a proof may also come from an agent one minor version older, whose job must
survive an upgrade of the operator. So until an agent of the job has proved an answer, only
figures are taken from it: that the job trains, which of the existing pods are members, step and
loss. Never anything that ends the job, moves a pod or counts against a budget (`done`,
`failure`, `fenced`, `left`, `silent`, `yielded`, `stopped`, incidents, …): the ends of such a job come from exit
reports through the kubelet. Once one agent has proved an answer, all of its job's agents can,
and unproven answers are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep_contract.levels import Peer, Seen, SlotAttempt, Wanted

ASKED_AT_ONCE = 32
"""Any agent forwards to the coordinator, so only this many agents of a large job are asked at a
time, in turn.
"""
ASKED_WHILE_QUIET = 4
"""How many agents are asked while the job trains and has received everything: its coordinator, and
some others in turn.
"""
ANSWER_BYTES, ANSWER_BYTES_OF_A_POD = 2**20, 12 * 2**10
"""Limit of an answer, and what each pod of the job adds to it: 64 members take 8 KiB. Whoever may create pods has
a job's token, and to read an answer takes six times its size in memory, and a second of the event loop for 16 MiB.
"""
INCIDENTS = 64
"""How many of the incidents in an answer are read, the newest ones. A coordinator reports 10, and each is compared
with all others.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One answer."""

    seen: Seen
    at: float
    """Monotonic time at which its figures were fresh."""
    proven: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a pass knows of the job's own report."""

    seen: Seen | None = None
    age: float = 0.0
    """Seconds since its figures were fresh."""
    callers: frozenset[str] = frozenset()
    """UIDs of pods whose agent has answered."""
    asked_for: Mapping[str, float] = field(default_factory=dict)
    """Pod UID → seconds since the operator started to ask it."""
    unproven: frozenset[str] = frozenset()
    """UIDs of pods whose address gives answers without a proof of the job's token."""


def choose_newest(answers: Sequence[Heard]) -> Heard | None:
    """The answer that counts in one round: proven answers come first, then one that reports the end
    of the job, then the highest epoch, then the youngest.
    """
    return max(answers, key=_rank, default=None)


def _rank(heard: Heard) -> tuple[bool, bool, bool, int, float]:
    seen = heard.seen
    return heard.proven, seen.done, seen.failure is not None, seen.epoch, heard.at


def replaces(new: Heard, held: Heard | None) -> bool:
    """Whether `new` replaces `held`. A coordinator that was cut off may still report an older
    epoch, which replaces nothing. A proven answer replaces any unproven one, so a forged high epoch
    cannot block the real reports.
    """
    if held is None or new.proven != held.proven:
        return held is None or new.proven
    return new.seen.done or new.seen.epoch >= held.seen.epoch


def take_figures(seen: Seen, wanted: Wanted) -> Seen:
    """The part of an unproven answer that is accepted."""
    places = {_place(peer) for peer in wanted.peers}
    members = tuple(
        m for m in seen.members if SlotAttempt(slot=m.slot, attempt=m.attempt) in places
    )
    return Seen(
        run=seen.run,
        epoch=1 if seen.epoch else 0,
        running=seen.running,
        members=members,
        step=seen.step,
        until=seen.until,
        loss=seen.loss,
        age_ms=seen.age_ms,
    )


def without_figures(seen: Seen) -> Seen:
    """The part of a report whose change must start a pass at once. Steps and losses are read when
    they are written.
    """
    return replace(
        seen,
        step=0,
        loss=None,
        members=tuple(replace(m, step=0) for m in seen.members),
        staged=None,
        committed=replace(seen.committed, age_ms=0) if seen.committed else None,
        good=None,
        seconds={},
        age_ms=0,
        incidents=tuple(replace(i, phases=()) for i in seen.incidents),
    )


def limit_answer(pods: int) -> int:
    """How many bytes of an answer are read."""
    return ANSWER_BYTES + pods * ANSWER_BYTES_OF_A_POD


def trim(seen: Seen) -> Seen:
    """The part of a proven answer that is read."""
    newest = seen.incidents[-INCIDENTS:]
    return seen if newest == seen.incidents else replace(seen, incidents=newest)


def choose_addresses(addresses: list[str], turn: int, coordinator: str | None) -> list[str]:
    """The agents to ask in this round: all of a small job, a moving window of a large one.
    `coordinator` is given while all is quiet; then it and a narrow window suffice.
    """
    at_once = ASKED_AT_ONCE if coordinator is None else ASKED_WHILE_QUIET
    if len(addresses) <= at_once:
        return addresses
    if coordinator is None:
        return _window(addresses, turn, at_once)
    others = [address for address in addresses if address != coordinator]
    return [coordinator, *_window(others, turn, at_once - 1)]


def _window(addresses: list[str], turn: int, width: int) -> list[str]:
    start = turn * width % len(addresses)
    return (addresses + addresses)[start : start + width]


def find_quiet_coordinator(
    seen: Seen | None, wanted: Wanted, told: Mapping[str, int]
) -> str | None:
    """The coordinator's address, if the job trains, no incident is open and every agent has
    accepted the newest document; else None. `told`: the newest revision that each agent has
    accepted, by address.
    """
    if seen is None or not seen.running or any(i.open for i in seen.incidents):
        return None
    if any(revision != wanted.revision for revision in told.values()):
        return None
    found = (p.address for p in wanted.peers if _place(p) == seen.coordinator)
    return next((address for address in found if address in told), None)


def _place(peer: Peer) -> SlotAttempt:
    return SlotAttempt(slot=peer.slot, attempt=peer.attempt)
