"""What is remembered of a node → what is held against it. Pure; the clock is an argument.

Convicting: an XID of which the table says so, an uncorrectable ECC error, a failed row remap, a GPU
that stays away from the exporter's pages. Silence convicts nobody: an exporter that we cannot read
says nothing about its node. Answered evidence is left out.
"""

from collections.abc import Iterator

from everstep_operator.evidence import Claim, Evidence, Finding, Kind, is_known, shown_time
from everstep_operator.health.outcomes import FailureKind
from everstep_operator.health.signals import (
    FaultKey,
    GpuMemory,
    Limits,
    NodeMemory,
    Onset,
    of_this_boot,
)
from everstep_operator.health.xids import Xid, XidTable, find_xid
from everstep_operator.nodes import NodeFacts
from everstep_operator.values import NodeState

REASON_XID = "GpuFatalXid"
REASON_DOUBLE_BIT = "GpuDoubleBitError"
REASON_REMAP = "GpuRowRemapFailed"
REASON_MISSING = "GpuMissing"
REASON_SILENT = "ExporterSilent"
REASON_FROZEN = "ExporterFrozen"
REASON_DEATH = "RankDied"


def decide_node(
    memory: NodeMemory,
    facts: NodeFacts,
    *,
    table: XidTable,
    limits: Limits,
    now: float,
    died_at: float | None = None,
) -> Finding:
    """`died_at`: when the last death of a rank on this node was reported."""
    memory = of_this_boot(memory, facts)  # the node may have rebooted since the last page
    claims = [
        claim
        for uuid, gpu in sorted(memory.gpus.items())
        for claim in _claims(uuid, gpu, facts, table, limits)
        if not is_known(claim.evidence, facts.answered)
    ]
    claims += _all_missing(memory, facts, limits)
    claims.sort(key=lambda c: (not c.convicts, c.evidence.first_seen, c.evidence.identity))
    silent_reason, silent = _silence(memory, limits, now)
    return Finding(
        node=facts.name,
        claims=tuple(claims),
        present=memory.present,
        silent=silent,
        silent_reason=silent_reason,
        doubt=_doubt(memory, claims, died_at, limits, now),
    )


def _claims(
    uuid: str, gpu: GpuMemory, facts: NodeFacts, table: XidTable, limits: Limits
) -> Iterator[Claim]:
    for key, onset in gpu.onsets.items():
        kind, code = key
        xid = find_xid(table, code)
        if kind is Kind.XID and not xid.convicts:
            continue
        yield _claim(uuid, gpu, facts, key, onset, xid)
    if gpu.missing:
        yield _missing(uuid, gpu, facts, limits)


def _claim(
    uuid: str, gpu: GpuMemory, facts: NodeFacts, key: FaultKey, onset: Onset, xid: Xid
) -> Claim:
    kind, code = key
    reason, what = {
        Kind.XID: (REASON_XID, f"reports XID {code} ({xid.meaning})"),
        Kind.DOUBLE_BIT: (REASON_DOUBLE_BIT, "reports an uncorrectable (double-bit) ECC error"),
        Kind.REMAP_FAILURE: (REASON_REMAP, "could not remap a faulty memory row"),
    }[kind]
    since = "since" if onset.appeared else "found at"
    return Claim(
        evidence=_evidence(uuid, facts, kind, code, onset),
        state=NodeState.LEAVING,
        reason=reason,
        message=f"{_gpu(uuid, gpu)} {what}, {since} {shown_time(onset.at)}",
        pods=tuple(sorted(gpu.pods)),
    )


def _missing(uuid: str, gpu: GpuMemory, facts: NodeFacts, limits: Limits) -> Claim:
    gone = gpu.missing >= limits.missing_scrapes
    pages = "" if gone else f" {gpu.missing} of {limits.missing_scrapes}"
    said = f"is missing from{pages} pages of an exporter that answers"
    onset = Onset(at=gpu.missing_since, appeared=gpu.seen)
    return Claim(
        evidence=_evidence(uuid, facts, Kind.MISSING, 0, onset),
        state=NodeState.GONE if gone else NodeState.SUSPECT,
        reason=REASON_MISSING,
        message=f"{_gpu(uuid, gpu)} {said}, since {shown_time(gpu.missing_since)}",
        pods=tuple(sorted(gpu.pods)),
    )


def _all_missing(memory: NodeMemory, facts: NodeFacts, limits: Limits) -> Iterator[Claim]:
    """An empty page is what an exporter gives for a moment while it reloads, and for ever when no
    GPU is left; the device plugin's count of usable GPUs tells the two apart."""
    if memory.failure is None or memory.failure.kind is not FailureKind.EMPTY:
        return
    if not facts.gpus or facts.allocatable or memory.failures < limits.missing_scrapes:
        return
    onset = Onset(at=memory.failing_since, appeared=memory.last_good is not None)
    for uuid, gpu in sorted(memory.gpus.items()):
        evidence = _evidence(uuid, facts, Kind.MISSING, 0, onset)
        if gpu.missing or is_known(evidence, facts.answered):
            continue
        message = (
            f"{_gpu(uuid, gpu)} is missing: the exporter's page is empty and the node offers none "
            f"of its {facts.gpus} GPUs, since {shown_time(onset.at)}"
        )
        yield Claim(
            evidence=evidence,
            state=NodeState.GONE,
            reason=REASON_MISSING,
            message=message,
            pods=tuple(sorted(gpu.pods)),
        )


def _evidence(uuid: str, facts: NodeFacts, kind: Kind, code: int, onset: Onset) -> Evidence:
    return Evidence(
        machine=facts.machine,
        gpu=uuid,
        kind=kind,
        code=code,
        first_seen=round(onset.at, 3),
        boot="" if kind.outlives_boot else facts.boot,
        appeared=onset.appeared,
    )


def _gpu(uuid: str, gpu: GpuMemory) -> str:
    return f"GPU {gpu.index} ({uuid})" if gpu.index else f"GPU {uuid}"


def _silence(memory: NodeMemory, limits: Limits, now: float) -> tuple[str, str]:
    if memory.failure is not None and memory.failures >= limits.silent_scrapes:
        since = shown_time(memory.failing_since)
        said = f"every scrape since {since} failed: {memory.failure.message}"
        return REASON_SILENT, f"{said}; what its GPUs do is not known"
    moved = memory.energy_moved
    if moved is not None and not memory.failures and now - moved > limits.frozen:
        said = f"the exporter answers, but no value has moved since {shown_time(moved)}"
        return REASON_FROZEN, f"{said}; what its GPUs do is not known"
    return "", ""


def _doubt(
    memory: NodeMemory, claims: list[Claim], died_at: float | None, limits: Limits, now: float
) -> str:
    """A death is doubtful until a page sampled after it shows every GPU. The doubt has an end: an
    exporter that is silent for another reason must not keep a slot empty."""
    watched = memory.last_good is not None
    if died_at is None or not watched or now - died_at > limits.doubt:
        return ""
    missing = any(claim.evidence.kind is Kind.MISSING for claim in claims)
    if not missing and memory.sampled_after is not None and memory.sampled_after > died_at:
        return ""
    return (
        f"a rank died here at {shown_time(died_at)} and no later page of the exporter "
        "has shown all GPUs yet"
    )
