"""Who may write what into the run log (rules 1, 2, 4 and 5). Pure.

The invariant: at any time the members of one claim write, the newest. A newer claim is possible
only when nobody whom it leaves out can still believe to be a majority of the run: they are dead,
declared gone, of a former job, or the fewer. So what was committed never becomes void, and what a
cut-off gang does after a newer claim never counts.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from everstep_contract.log import ChainLink, Claim, Commit, Entry, LeftOut, MemberId, Retire

GONE = "declared gone"
"""In a claim's list of those left out: by the operator's decision, for good."""


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
    """(slot, attempt, incarnation) of containers reported terminated; earlier incarnations died
    before.
    """
    gone: frozenset[tuple[int, int]] = frozenset()
    """(slot, attempt) that the operator declared gone: a decision, the process may still run."""


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
    unproven = [m for m in newest.members if m not in members and not why_out(m, members, proof)]
    if not unproven:
        return Verdict(ok=True, reason="AllProven", message="whoever is left out is dead or gone")
    if holds_majority(newest, members):
        return Verdict(
            ok=True, reason="Majority", message=f"more than half of epoch {newest.epoch}"
        )
    names = ", ".join(f"slot {m.slot} attempt {m.attempt} rank {m.rank}" for m in unproven[:4])
    text = f"not known to be dead or gone: {names}, of epoch {newest.epoch}"
    return Verdict(ok=False, reason="Unproven", message=text)


def is_former_job(newest: Claim, claims: Iterable[Claim], job_uid: str) -> bool:
    """A job comes after those that claimed before it first did; it never takes the run back from a
    later one.
    """
    return newest.job_uid != job_uid and all(c.job_uid != job_uid for c in claims)


def why_out(member: MemberId, members: Iterable[MemberId], proof: Proof) -> str:
    """Why `member` may be left out: a proof of its death or the word that it is gone; empty if
    there is none.
    """
    if member in proof.dead:
        return "its agent reported its end"
    for slot, attempt, incarnation in proof.dead_agents:
        if (slot, attempt) == (member.slot, member.attempt) and incarnation >= member.incarnation:
            return "its container terminated"
    if any(s == member.slot and a >= member.attempt for s, a in proof.gone):
        return GONE
    for new in members:
        if new.slot == member.slot and new.attempt > member.attempt:
            return f"attempt {new.attempt} of its slot runs"
        same_pod = (new.slot, new.attempt) == (member.slot, member.attempt)
        if same_pod and new.incarnation > member.incarnation:
            return "its agent was started again"
        same_place = same_pod and new.incarnation == member.incarnation and new.rank == member.rank
        if same_place and new.life > member.life:
            return "its process was started again"
    return ""


def holds_majority(newest: Claim, members: Collection[MemberId]) -> bool:
    """More than half of the claim's members; of exactly half, the half with the lowest slot."""
    held = [m for m in newest.members if m in members]
    if 2 * len(held) != len(newest.members):
        return 2 * len(held) > len(newest.members)
    return bool(held) and min(newest.members) in held


def build_left_out(
    newest: Claim | None, members: Collection[MemberId], proof: Proof
) -> tuple[LeftOut, ...]:
    """For the claim: the slots of the last epoch that the new one does not have, each with its
    reason.
    """
    slots = {m.slot for m in members}
    out: dict[tuple[int, int], str] = {}
    for member in newest.members if newest else ():
        if member.slot not in slots:
            why = why_out(member, members, proof) or "left behind by the majority"
            out.setdefault((member.slot, member.attempt), why)
    return tuple(LeftOut(slot=s, attempt=a, why=w) for (s, a), w in sorted(out.items()))


# --- rule 1: who may append -----------------------------------------------------------------------


def may_append(entry: Entry, newest: Claim | None) -> Verdict:
    """A claim (judged by `may_claim`) needs a number that is new; every other entry must carry the
    token of the newest claim read.
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
            f"epoch {newest.epoch} of job {newest.job} has claimed the run;"
            f" a {type(entry).__name__.lower()} of epoch {entry.epoch} is no longer taken"
        )
        return Verdict(ok=False, reason="NewerClaim", message=text)
    return Verdict(ok=True, reason="OwnClaim", message=f"epoch {newest.epoch} is the newest claim")


# --- rule 4: one lineage --------------------------------------------------------------------------


def chain_of(claims: Iterable[Claim], resume: Commit | None) -> tuple[ChainLink, ...]:
    """The chain that a new claim carries when it goes on from `resume` (None: from step 0)."""
    if resume is None:
        return ()
    before = next((c.chain for c in reversed(list(claims)) if c.epoch == resume.epoch), ())
    older = tuple(link for link in before if link.epoch != resume.epoch)
    return (*older, ChainLink(epoch=resume.epoch, last_step=resume.step))


def on_chain(epoch: int, step: int, chain: Iterable[ChainLink]) -> bool:
    return any(link.epoch == epoch and step <= link.last_step for link in chain)


def lineage_of(newest: Claim | None) -> tuple[ChainLink, ...]:
    """What may be continued: the newest claim's chain, and all of its own epoch."""
    if newest is None:
        return ()
    return (*newest.chain, ChainLink(epoch=newest.epoch, last_step=_ALL))


_ALL = 2**62


def list_resumable(entries: Sequence[Entry]) -> list[Commit]:
    """Commits on the newest claim's lineage that were not retired, newest first."""
    newest = newest_claim(entries)
    chain, retired = lineage_of(newest), list_retired(entries)
    commits = [e for e in entries if isinstance(e, Commit)]
    return [
        c
        for c in reversed(commits)
        if on_chain(c.epoch, c.step, chain) and c.manifest not in retired.manifests
    ]


def newest_resumable(entries: Sequence[Entry]) -> Commit | None:
    return next(iter(list_resumable(entries)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    manifests: frozenset[str] = frozenset()
    chunks: frozenset[str] = frozenset()


def list_retired(entries: Iterable[Entry]) -> Retired:
    retires = [e for e in entries if isinstance(e, Retire)]
    return Retired(
        manifests=frozenset(k for r in retires for k in r.manifests),
        chunks=frozenset(k for r in retires for k in r.chunks),
    )


def newest_claim(entries: Sequence[Entry]) -> Claim | None:
    return next((e for e in reversed(entries) if isinstance(e, Claim)), None)


def why_overtaken(claim: Claim, newest: Claim | None) -> str:
    """Why an epoch is not begun though its claim stands: we hear so late of it that a newer one does, too."""
    if newest is None or newest == claim:
        return ""
    return (
        f"epoch {newest.epoch} was claimed before we heard that our claim of {claim.epoch} stands"
    )


# --- rule 5: fenced -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The pods of one running epoch, as one of their agents knows them."""

    epoch: int
    job_uid: str
    pods: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """(slot, attempt)"""


def fenced(newest: Claim | None, gang: Gang) -> Verdict:
    """`ok` while the gang may go on; not ok: it stops, and its members never write again.

    Reason `Named` means that the newer claim names some of us: they leave and join it.
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
        text = f"epoch {newest.epoch} goes on with slots {slots} of ours"
        return Verdict(ok=True, reason="Named", message=text)
    text = f"epoch {newest.epoch} of the same job goes on without any of epoch {gang.epoch}"
    return Verdict(ok=False, reason="Fenced", message=text)


def why_pod_is_over(newest: Claim | None, job_uid: str, slot: int, attempt: int) -> str:
    """Why the newest claim gives this pod of the job up; empty if it may be heard or join again."""
    if newest is None or newest.job_uid != job_uid:
        return ""
    for m in newest.members:
        if m.slot == slot and m.attempt > attempt:
            return f"epoch {newest.epoch} goes on with attempt {m.attempt} of slot {slot}"
    if any((x.slot, x.attempt, x.why) == (slot, attempt, GONE) for x in newest.left_out):
        return f"epoch {newest.epoch} goes on without slot {slot}, which was declared gone"
    return ""


# --- what the log remembers -----------------------------------------------------------------------


def count_restarts(entries: Iterable[Entry], job_uid: str) -> dict[str, int]:
    """Group restarts of this job by cause: its claims after the first."""
    causes = [
        e.cause or "Unknown" for e in entries if isinstance(e, Claim) and e.job_uid == job_uid
    ]
    return {cause: causes[1:].count(cause) for cause in dict.fromkeys(causes[1:])}


def next_epoch(entries: Iterable[Entry], burnt: int = 0) -> int:
    """A number that no epoch ever had; `burnt` is the highest that a failed round of ours used."""
    return 1 + max(burnt, max((e.epoch for e in entries), default=0))
