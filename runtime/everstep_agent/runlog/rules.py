"""Which process may write what into the run log (rules 1 to 5). Pure. The log's content is in
`log_index.py`.

The invariant: at any time only members of the newest claim write. A newer claim is possible only
when no member that it leaves out can still belong to a majority of the run: they are dead, declared
gone, of a former job, or a minority. So no commit ever becomes void, and writes of a cut-off gang
after a newer claim never count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from everstep_contract.log import ChainLink, Claim, Commit, Entry, LeftOut, MemberId

Name = TypeVar("Name")

GONE = "declared gone"
"""Reason in a claim's `left_out` for the operator's decision, which is final."""
RECENT_LINKS = 100
"""A claim's chain keeps this many links, and the older ones on which a checkpoint lies. A save that
was begun more epochs ago and is still not committed is given up; a later save replaces it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    ok: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known about members that a new epoch leaves out."""

    dead: frozenset[MemberId] = frozenset()
    """Exit status from the rank's own agent."""
    dead_agents: frozenset[tuple[int, int, int]] = frozenset()
    """(slot, attempt, incarnation) of containers reported terminated; earlier incarnations ended
    before.
    """
    gone: frozenset[tuple[int, int]] = frozenset()
    """(slot, attempt) that the operator declared gone: a decision, the process may still run."""
    yields: frozenset[tuple[int, int, int]] = frozenset()
    """(slot, attempt, epoch) that may be left out as long as the claim of that epoch is the newest."""


# --- rule 2: who may claim ------------------------------------------------------------------------


def may_claim(
    claims: Sequence[Claim],
    members: Collection[MemberId],
    proof: Proof,
    *,
    job_uid: str,
) -> Verdict:
    """Whether an epoch of `members` may claim after the newest of `claims` (all of the log, in
    order).
    """
    if not members:
        return Verdict(ok=False, reason="NoMembers", message="an epoch needs at least one member")
    if not claims:
        return Verdict(ok=True, reason="FirstClaim", message="the run has no claim yet")
    newest = claims[-1]
    if is_former_job(newest, claims, job_uid):
        text = f"the run was last written by a former job {newest.job} ({newest.job_uid})"
        return Verdict(ok=True, reason="FormerJob", message=text)
    if newest.job_uid != job_uid:
        text = f"job {newest.job} ({newest.job_uid}) took the run over from this job ({job_uid})"
        return Verdict(ok=False, reason="Fenced", message=text)
    held, grounds = frozenset(members), _build_grounds(members, proof, newest.epoch)
    unproven = [m for m in newest.members if m not in held and not _why_out(m, grounds)]
    if not unproven:
        return Verdict(ok=True, reason="AllProven", message="all members left out are dead or gone")
    if holds_majority(newest, members, list_dead(newest, proof, members)):
        text = (
            f"more than half of the members of epoch {newest.epoch} that are not known to be dead"
        )
        return Verdict(ok=True, reason="Majority", message=text)
    names = ", ".join(f"slot {m.slot} attempt {m.attempt} rank {m.rank}" for m in unproven[:4])
    text = f"not known to be dead or gone: {names}, of epoch {newest.epoch}"
    return Verdict(ok=False, reason="Unproven", message=text)


def is_former_job(newest: Claim, claims: Iterable[Claim], job_uid: str) -> bool:
    """Whether the newest claim is of a former job. A job is later than all jobs that claimed before
    its own first claim; it never takes the run back from a later one.
    """
    return newest.job_uid != job_uid and all(c.job_uid != job_uid for c in claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grounds:
    """The proofs for leaving members out, indexed, so that an epoch of thousands takes one look-up per member."""

    dead: frozenset[MemberId]
    ended: Mapping[tuple[int, int], int]
    """(slot, attempt) → newest incarnation whose container has terminated."""
    gone: Mapping[int, int]
    """Slot → newest attempt that was declared gone."""
    yielded: Mapping[int, int]
    """Slot → newest attempt that may be left out after the newest claim."""
    attempts: Mapping[int, int]
    """Slot → its newest attempt among the new members."""
    incarnations: Mapping[tuple[int, int], int]
    lives: Mapping[tuple[int, int, int, int], int]
    """(slot, attempt, incarnation, rank) → newest life among the new members."""


def _build_grounds(members: Iterable[MemberId], proof: Proof, newest: int) -> _Grounds:
    """`newest`: the epoch of the newest claim."""
    members = list(members)
    return _Grounds(
        dead=proof.dead,
        ended=_newest(((slot, attempt), number) for slot, attempt, number in proof.dead_agents),
        gone=_newest(proof.gone),
        yielded=_newest(
            (slot, attempt) for slot, attempt, epoch in proof.yields if epoch == newest
        ),
        attempts=_newest((m.slot, m.attempt) for m in members),
        incarnations=_newest(((m.slot, m.attempt), m.incarnation) for m in members),
        lives=_newest(((m.slot, m.attempt, m.incarnation, m.rank), m.life) for m in members),
    )


def _newest(pairs: Iterable[tuple[Name, int]]) -> dict[Name, int]:
    found: dict[Name, int] = {}
    for name, number in pairs:
        found[name] = max(number, found.get(name, number))
    return found


def _why_out(member: MemberId, grounds: _Grounds) -> str:
    """Why `member` may be left out: proof of its death, or the operator's decision; empty if there
    is neither.
    """
    if why := _why_dead(member, grounds):
        return why
    if grounds.gone.get(member.slot, -1) >= member.attempt:
        return GONE
    if grounds.yielded.get(member.slot, -1) == member.attempt:
        return "its node and its agent were silent, and the operator let it be left out"
    if (attempt := grounds.attempts.get(member.slot, member.attempt)) > member.attempt:
        return f"attempt {attempt} of its slot runs"
    return ""


def _why_dead(member: MemberId, grounds: _Grounds) -> str:
    """The proof of its death; empty if there is none. The operator's decisions prove nothing, nor does
    a newer attempt of its slot, which is one of them.
    """
    pod = member.slot, member.attempt
    place = (*pod, member.incarnation, member.rank)
    if member in grounds.dead:
        return "its agent reported its end"
    if grounds.ended.get(pod, -1) >= member.incarnation:
        return "its container terminated"
    if grounds.incarnations.get(pod, member.incarnation) > member.incarnation:
        return "its agent was restarted"
    if grounds.lives.get(place, member.life) > member.life:
        return "its process was restarted"
    return ""


def list_dead(
    newest: Claim, proof: Proof, members: Collection[MemberId] = ()
) -> frozenset[MemberId]:
    """The claim's members whose ends are proven, also by the new `members`."""
    held, grounds = frozenset(members), _build_grounds(members, proof, newest.epoch)
    return frozenset(m for m in newest.members if m not in held and _why_dead(m, grounds))


def holds_majority(
    newest: Claim, members: Collection[MemberId], dead: Collection[MemberId] = frozenset()
) -> bool:
    """Whether `members` are more than half of the claim's members that are not dead; of exactly half,
    the half with the lowest slot. Two groups that share no member never both are, even if each knows
    of other deaths: a death that one of them does not know of only makes it need more members.

    Args:
        dead: members whose ends are proven.
    """
    kept, ended = frozenset(members), frozenset(dead)
    living = [m for m in newest.members if m in kept or m not in ended]
    held = [m for m in living if m in kept]
    if 2 * len(held) != len(living):
        return 2 * len(held) > len(living)
    return bool(held) and min(living) in held


def build_left_out(
    newest: Claim | None, members: Collection[MemberId], proof: Proof
) -> tuple[LeftOut, ...]:
    """For the claim: the slots of the last epoch that are not in the new one, each with its reason."""
    slots = {m.slot for m in members}
    grounds = _build_grounds(members, proof, newest.epoch if newest else 0)
    out: dict[tuple[int, int], str] = {}
    for member in newest.members if newest else ():
        if member.slot not in slots:
            why = _why_out(member, grounds) or "left behind by the majority"
            out.setdefault((member.slot, member.attempt), why)
    return tuple(LeftOut(slot=s, attempt=a, why=w) for (s, a), w in sorted(out.items()))


# --- rule 3: step first or claim first ------------------------------------------------------------


def may_step_first(
    claims: Sequence[Claim],
    former: int,
    members: Collection[MemberId],
    ended: Collection[MemberId],
    *,
    job_uid: str,
) -> Verdict:
    """Whether an epoch of `members` that continues epoch `former` may step before its claim is in
    the log: it only shrinks, and the death of each member that it leaves out is proven.

    Args:
        claims: as read, and those that are to be appended before this one.
        ended: members whose own agents reported their ends. No other proof counts here: a member
            that is only known to be gone, or whose agent was restarted, may have written under
            another coordinator.
    """
    newest = claims[-1] if claims else None
    if newest is None or newest.epoch != former or newest.job_uid != job_uid:
        return Verdict(ok=False, reason="NewerClaim", message=f"epoch {former} is not the newest")
    held = frozenset(members)
    if not held or held - frozenset(newest.members):
        return Verdict(ok=False, reason="Newcomer", message="a member is new")
    if unproven := sorted(frozenset(newest.members) - held - frozenset(ended)):
        text = f"the agent of slot {unproven[0].slot} did not report its worker's end"
        return Verdict(ok=False, reason="Unproven", message=text)
    return Verdict(ok=True, reason="ProvenShrink", message="all members left out are dead")


def why_not_behind(claim: Claim, newest: Claim | None) -> str:
    """Why the claim of an epoch that steps first may not be appended; empty if it may, because
    nobody else has claimed the run since it was judged. Deaths stay proven, whoever appends the
    claim.
    """
    former = former_of(claim)
    if newest is not None and newest.epoch == former and newest.job_uid == claim.job_uid:
        return ""
    other = f"epoch {newest.epoch} of job {newest.job_uid}" if newest else "nobody"
    return f"epoch {claim.epoch} continues epoch {former}, but {other} has claimed the run since"


# --- rule 1: who may append -----------------------------------------------------------------------


def may_append(entry: Entry, newest: Claim | None) -> Verdict:
    """A claim (judged by `may_claim`) needs a new number; every other entry must carry the token of
    the newest claim that was read.
    """
    if isinstance(entry, Claim):
        if newest is not None and entry.epoch <= newest.epoch:
            text = (
                f"epoch {entry.epoch} is not after epoch {newest.epoch}, which has claimed the run"
            )
            return Verdict(ok=False, reason="EpochUsed", message=text)
        return Verdict(ok=True, reason="Claim", message="a claim is judged before it is appended")
    if newest is None:
        return Verdict(ok=False, reason="NoClaim", message="nobody has claimed the run yet")
    if newest.token != entry.token:
        text = (
            f"epoch {newest.epoch} of job {newest.job} has claimed the run; a {type(entry).__name__.lower()} "
            f"of epoch {entry.epoch} is no longer accepted"
        )
        return Verdict(ok=False, reason="NewerClaim", message=text)
    return Verdict(ok=True, reason="OwnClaim", message=f"epoch {newest.epoch} is the newest claim")


# --- rule 4: one lineage --------------------------------------------------------------------------


def chain_of(claims: Iterable[Claim], resume: Commit | None) -> tuple[ChainLink, ...]:
    """The chain of a new claim that continues from `resume` (None: from step 0)."""
    if resume is None:
        return ()
    before = next((c.chain for c in reversed(list(claims)) if c.epoch == resume.epoch), ())
    older = tuple(link for link in before if link.epoch != resume.epoch)
    return (*older, ChainLink(epoch=resume.epoch, last_step=resume.step))


def continued_chain(claims: Iterable[Claim], epoch: int, last_step: int) -> tuple[ChainLink, ...]:
    """The chain of a claim whose members continue with the live state of `epoch` as of `last_step`."""
    before = next((c.chain for c in reversed(list(claims)) if c.epoch == epoch), ())
    return (*before, ChainLink(epoch=epoch, last_step=last_step))


def shorten_chain(
    chain: tuple[ChainLink, ...], first_steps: Mapping[int, int]
) -> tuple[ChainLink, ...]:
    """Drop the links that no checkpoint needs, so that the log does not grow with the square of the
    epochs. A save that is still being uploaded needs one of the newest links.

    Args:
        first_steps: as `LogIndex.first_steps`.
    """
    older, newest = chain[:-RECENT_LINKS], chain[-RECENT_LINKS:]
    needed = (x for x in older if first_steps.get(x.epoch, _ALL) <= x.last_step)
    return (*needed, *newest)


def on_chain(epoch: int, step: int, chain: Iterable[ChainLink]) -> bool:
    return any(link.epoch == epoch and step <= link.last_step for link in chain)


def why_behind(newest: Commit | None, chain: Iterable[ChainLink]) -> str:
    """Why live state on this chain may not be continued: the newest commit is not on it. A former
    coordinator may have saved a further step, which must not become void.
    """
    if newest is None or on_chain(newest.epoch, newest.step, chain):
        return ""
    return f"a checkpoint of step {newest.step} (epoch {newest.epoch}) is ahead of the survivors"


def former_of(claim: Claim) -> int:
    """Number of the epoch whose state this claim continues; 0: none."""
    return claim.chain[-1].epoch if claim.chain else 0


def oldest_living(claims: Sequence[Claim]) -> int:
    """The oldest epoch whose workers may continue: the newest claim's epoch, or the one that it
    continues in place, whose workers need not have entered the new one yet. 0: nothing is claimed.
    """
    if not claims:
        return 0
    newest = claims[-1]
    former = next((c for c in reversed(claims) if c.epoch == former_of(newest)), None)
    if former is None or former.job_uid != newest.job_uid:
        return newest.epoch
    restarted = set(former.members).isdisjoint(newest.members)
    return newest.epoch if restarted else former.epoch


def find_successor(
    newest: Claim | None, epoch: int, members: Collection[MemberId], job_uid: str
) -> Claim | None:
    """The newest claim, if it continues this epoch in place with some of its members, and perhaps
    with newcomers. If the claimed epoch never began, because its coordinator was lost before it
    could publish it, saves of this epoch are committed under that claim.
    """
    if newest is None or newest.job_uid != job_uid:
        return None
    in_place = not set(newest.members).isdisjoint(members)
    return newest if former_of(newest) == epoch and in_place else None


def lineage_of(newest: Claim | None) -> tuple[ChainLink, ...]:
    """What may be continued: the newest claim's chain, and all of its own epoch."""
    if newest is None:
        return ()
    return (*newest.chain, ChainLink(epoch=newest.epoch, last_step=_ALL))


_ALL = 2**62


def newest_claim(entries: Sequence[Entry]) -> Claim | None:
    return next((e for e in reversed(entries) if isinstance(e, Claim)), None)


def why_overtaken(claim: Claim, newest: Claim | None) -> str:
    """Why an epoch must not start although its claim is in the log: a newer claim was made before
    this coordinator learned of it.
    """
    if newest is None or newest == claim:
        return ""
    return (
        f"epoch {newest.epoch} was claimed before this coordinator learned that its "
        f"claim of {claim.epoch} had succeeded"
    )


# --- rule 5: fenced -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The pods of one running epoch, as one of their agents knows them."""

    epoch: int
    """The newest epoch in its lineage that is claimed."""
    job_uid: str
    pods: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """(slot, attempt)"""


def fenced(newest: Claim | None, gang: Gang) -> Verdict:
    """`ok` while the gang may continue; not ok: it stops, and its members never write again.

    Reason `Named`: the newer claim names some of its members, which leave and join that epoch.
    """
    if newest is None or (newest.epoch <= gang.epoch and newest.job_uid == gang.job_uid):
        return Verdict(
            ok=True, reason="Newest", message=f"no claim is newer than epoch {gang.epoch}"
        )
    if newest.job_uid != gang.job_uid:
        text = f"job {newest.job} ({newest.job_uid}) has taken the run over"
        return Verdict(ok=False, reason="Fenced", message=text)
    named = sorted(gang.pods & {(m.slot, m.attempt) for m in newest.members})
    if named:
        slots = ", ".join(str(slot) for slot, _ in named)
        text = f"epoch {newest.epoch} continues with slots {slots} of this gang"
        return Verdict(ok=True, reason="Named", message=text)
    text = f"epoch {newest.epoch} of the same job continues without any pod of epoch {gang.epoch}"
    return Verdict(ok=False, reason="Fenced", message=text)


def why_pod_is_over(newest: Claim | None, job_uid: str, slot: int, attempt: int) -> str:
    """Why the newest claim excludes this pod of the job; empty if the pod may still take part."""
    if newest is None or newest.job_uid != job_uid:
        return ""
    for m in newest.members:
        if m.slot == slot and m.attempt > attempt:
            return f"epoch {newest.epoch} continues with attempt {m.attempt} of slot {slot}"
    if any((x.slot, x.attempt, x.why) == (slot, attempt, GONE) for x in newest.left_out):
        return f"epoch {newest.epoch} continues without slot {slot}, which was declared gone"
    return ""
