"""Evidence against a GPU, as values that `health` and `fleet` share.

Evidence has an identity: (machine, GPU, kind, code, first seen, boot). Answered evidence (a
person knew it and released the node) never convicts again; a new occurrence of the same fault
does. A restarted operator finds latched values and cannot know when they appeared: such
evidence counts as equal to any earlier evidence with the same key.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from everstep_operator.values import GonePods, NodeState

MISSING = "gpu-missing"
"""The only kind of evidence that no rule in `health/rules` finds: the GPU itself is missing."""

Key = tuple[str, str, str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    machine: str
    gpu: str
    """UUID."""
    kind: str
    """The kind of a rule in `health/rules/rules.csv`, or MISSING. Readers must accept any kind."""
    code: int = 0
    """Distinguishes faults of one kind, as the XID does; 0 if nothing does."""
    first_seen: float
    """Seconds since the Unix epoch, the operator's clock."""
    boot: str = ""
    appeared: bool = True
    """True: it was seen to appear. False: it was present when the operator first looked."""

    @property
    def key(self) -> Key:
        return (self.machine, self.gpu, self.kind, self.code, self.boot)

    @property
    def identity(self) -> str:
        machine, gpu, kind, code, boot = self.key
        return f"{machine}/{gpu}/{kind}/{code}/{boot}/{self.first_seen:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One piece of evidence and what follows from it."""

    evidence: Evidence
    state: NodeState
    """LEAVING and GONE convict the node; SUSPECT waits for more evidence."""
    reason: str
    message: str
    pods: tuple[str, ...] = ()
    """"namespace/name" of the pods that held the GPU, according to the newest page."""

    @property
    def convicts(self) -> bool:
        return self.state in (NodeState.LEAVING, NodeState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What `health` has found on one node, without answered evidence."""

    node: str
    claims: tuple[Claim, ...] = ()
    """The convicting claims first; the oldest first in each group."""
    present: frozenset[str] = frozenset()
    """UUIDs that the newest good page showed."""
    clear: frozenset[tuple[str, str]] = frozenset()
    """(GPU, kind of evidence) that the newest good page showed to be without a fault; an XID in the
    gauge may have overwritten another one, so such a GPU is not clear of XIDs. Empty: no page of
    this boot was read.
    """
    silent: str = ""
    """Why the GPUs cannot be observed; empty if they can."""
    silent_reason: str = ""
    doubt: str = ""
    """Not empty: a rank died here, and no later page has shown all GPUs yet."""
    holders: tuple[str, ...] = ()
    """"namespace/name" of the pods that hold a working GPU, according to the newest page."""

    @property
    def convicting(self) -> tuple[Claim, ...]:
        return tuple(claim for claim in self.claims if claim.convicts)


def covers(known: Evidence, found: Evidence) -> bool:
    """Whether `found` is the evidence `known` again, and not a new occurrence of the same fault."""
    return known.key == found.key and (not found.appeared or found.first_seen <= known.first_seen)


def is_known(found: Evidence, known: Iterable[Evidence]) -> bool:
    return any(covers(one, found) for one in known)


def merge_evidence(old: Sequence[Evidence], new: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """`old` and what `new` adds to it; a newer occurrence replaces an older one."""
    merged = list(old)
    for one in new:
        if not is_known(one, merged):
            merged = [known for known in merged if known.key != one.key] + [one]
    return tuple(merged)


def still_applies(evidence: Evidence, *, machine: str, boot: str) -> bool:
    """False for evidence from another machine or an earlier boot, which cannot occur again."""
    return evidence.machine == machine and evidence.boot in ("", boot)


def choose_first(evidence: Iterable[Evidence]) -> Evidence:
    return min(evidence, key=lambda one: (one.first_seen, one.identity))


def build_incident(evidence: Iterable[Evidence]) -> str:
    """The incident's id: a pure function of its first evidence, so that a repeated pass gives the
    same id.
    """
    digest = hashlib.sha256(choose_first(evidence).identity.encode()).hexdigest()
    return f"inc-{digest[:10]}"


def choose_state(claims: Iterable[Claim]) -> NodeState:
    """GONE if any GPU is gone, else LEAVING."""
    gone = any(claim.state is NodeState.GONE for claim in claims)
    return NodeState.GONE if gone else NodeState.LEAVING


def choose_gone_pods(claims: Iterable[Claim], holders: tuple[str, ...]) -> GonePods:
    """Choose the pods that are gone, for claims with a lost GPU.

    An exporter names no pod for an idle GPU, nor for one that vanished while no operator was
    watching. In that case the pods on working GPUs are asked to save, and all others are gone.
    """
    gone = [claim for claim in claims if claim.state is NodeState.GONE]
    if not all(claim.pods for claim in gone):
        return GonePods(spared=holders)
    return GonePods(holders=tuple(sorted({pod for claim in gone for pod in claim.pods})))


def choose_reason(claims: Iterable[Claim]) -> str:
    """The reason of the worst claim: GONE is worse than any other state."""
    return min(claims, key=_badness).reason


def build_message(node: str, claims: Iterable[Claim]) -> str:
    ordered = sorted(claims, key=_badness)
    more = f" (and {len(ordered) - 1} more finding{'s' * (len(ordered) > 2)})"
    return f"node {node}: {ordered[0].message}{more if len(ordered) > 1 else ''}"


def _badness(claim: Claim) -> tuple[bool, float, str]:
    evidence = claim.evidence
    return (claim.state is not NodeState.GONE, evidence.first_seen, evidence.identity)


def to_rfc3339(at: float) -> str:
    text = datetime.fromtimestamp(round(at, 3), UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def from_rfc3339(text: str) -> float:
    """Raises ValueError if `text` is not a time."""
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp(), 3)


def shown_time(at: float) -> str:
    """Date and time, UTC, for messages: a quarantine may stand for weeks."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S}Z"
