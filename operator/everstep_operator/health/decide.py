"""A node's memory → its finding. Pure; the clock is an argument.

Evidence is what the rules of `rules/rules.csv` find, and a GPU that is missing from the
exporter's pages. Silence convicts no node: an exporter that cannot be read is no evidence.
Answered evidence is left out.
"""

from collections.abc import Iterator

from everstep_operator.evidence import MISSING, Claim, Evidence, Finding, is_known, shown_time
from everstep_operator.health.outcomes import FailureKind
from everstep_operator.health.rules.registry import Rules
from everstep_operator.health.signals import (
    GpuMemory,
    Limits,
    NodeMemory,
    Onset,
    of_this_boot,
)
from everstep_operator.nodes import NodeFacts
from everstep_operator.values import NodeState

REASON_MISSING = "GpuMissing"
REASON_SILENT = "ExporterSilent"
REASON_FROZEN = "ExporterFrozen"
REASON_CONTESTED = "ExporterContested"
REASON_DEATH = "RankDied"
LEAVE_ONE = (
    "Leave one DaemonSet of exporters on the node, or narrow exporter.selectors and exporter.namespaces "
    "(the chart's values) to one"
)


def decide_node(
    memory: NodeMemory,
    facts: NodeFacts,
    *,
    rules: Rules,
    limits: Limits,
    now: float,
    died_at: float | None = None,
) -> Finding:
    """`died_at`: when the last death of a rank on this node was reported."""
    memory = of_this_boot(memory, facts, rules)  # the node may have rebooted since the last page
    claims = [
        claim
        for uuid, gpu in sorted(memory.gpus.items())
        for claim in _claims(uuid, gpu, facts, rules, limits)
        if not _is_answered(claim.evidence, facts)
    ]
    claims += _all_missing(memory, facts, limits)
    claims.sort(key=lambda c: (not c.convicts, c.evidence.first_seen, c.evidence.identity))
    silent_reason, silent = _silence(memory, limits)
    return Finding(
        node=facts.name,
        claims=tuple(claims),
        present=memory.present,
        clear=frozenset(_list_clear(memory)),
        silent=silent,
        silent_reason=silent_reason,
        doubt=_doubt(memory, claims, died_at, limits, now),
        holders=_holders(memory, claims),
    )


def _is_answered(evidence: Evidence, facts: NodeFacts) -> bool:
    """A release takes a missing GPU off the node's list of expected GPUs. If the GPU is listed, it was back
    since then, so its absence is new, also to a process that has not seen it.
    """
    unseen = evidence.kind == MISSING and not evidence.appeared
    if unseen and evidence.gpu in facts.expected:
        return False
    return is_known(evidence, facts.answered)


def _holders(memory: NodeMemory, claims: list[Claim]) -> tuple[str, ...]:
    """Pods on GPUs that the newest good page shows and that no claim calls gone."""
    lost = {claim.evidence.gpu for claim in claims if claim.state is NodeState.GONE}
    working = (memory.gpus[uuid] for uuid in memory.present - lost if uuid in memory.gpus)
    return tuple(sorted({pod for gpu in working for pod in gpu.pods}))


def _list_clear(memory: NodeMemory) -> Iterator[tuple[str, str]]:
    for uuid in memory.present & memory.gpus.keys():
        gpu = memory.gpus[uuid]
        yield uuid, MISSING
        faulty = {kind for kind, _ in gpu.onsets}
        yield from ((uuid, kind) for kind in gpu.shown - faulty)


def _claims(
    uuid: str, gpu: GpuMemory, facts: NodeFacts, rules: Rules, limits: Limits
) -> Iterator[Claim]:
    for (kind, code), onset in gpu.onsets.items():
        rule = rules.by_kind[kind]
        words = rule.describe(code)
        if words is None:
            continue
        since = "since" if onset.appeared else "found at"
        boot = "" if rule.outlives_boot else facts.boot
        yield Claim(
            evidence=_evidence(uuid, facts, kind, code, onset, boot),
            state=rule.state,
            reason=rule.reason,
            message=f"{_gpu(uuid, gpu)} {words}, {since} {shown_time(onset.at)}",
            pods=tuple(sorted(gpu.pods)),
        )
    if gpu.missing:
        yield _missing(uuid, gpu, facts, limits)


def _missing(uuid: str, gpu: GpuMemory, facts: NodeFacts, limits: Limits) -> Claim:
    gone = gpu.missing >= limits.missing_scrapes
    said = (
        f"is missing from the last {limits.missing_scrapes} or more pages of its exporter, which answers"
        if gone
        else f"is missing from the last {gpu.missing} pages of its exporter "
        f"({limits.missing_scrapes} in a row count as a lost GPU)"
    )
    onset = Onset(at=gpu.missing_since, appeared=gpu.seen)
    return Claim(
        evidence=_evidence(uuid, facts, MISSING, 0, onset, facts.boot),
        state=NodeState.GONE if gone else NodeState.SUSPECT,
        reason=REASON_MISSING,
        message=f"{_gpu(uuid, gpu)} {said}, since {shown_time(gpu.missing_since)}",
        pods=tuple(sorted(gpu.pods)),
    )


def _all_missing(memory: NodeMemory, facts: NodeFacts, limits: Limits) -> Iterator[Claim]:
    """An exporter shows no GPU briefly while it reloads, as long as it is broken itself, and when no GPU
    is left. The device plugin's count of usable GPUs distinguishes the last from the others.
    """
    if memory.failure is None or not memory.failure.answers:
        return
    if not facts.gpus or facts.allocatable or memory.empty < limits.missing_scrapes:
        return
    onset = Onset(at=memory.failing_since, appeared=memory.last_good is not None)
    expected = {uuid: GpuMemory() for uuid in facts.expected}  # this process may have seen no page
    for uuid, gpu in sorted({**expected, **memory.gpus}.items()):
        evidence = _evidence(uuid, facts, MISSING, 0, onset, facts.boot)
        if gpu.missing or _is_answered(evidence, facts):
            continue
        message = (
            f"{_gpu(uuid, gpu)} is missing: the exporter's page shows no GPU and the node offers none "
            f"of its {facts.gpus} GPUs, since {shown_time(onset.at)}"
        )
        yield Claim(
            evidence=evidence,
            state=NodeState.GONE,
            reason=REASON_MISSING,
            message=message,
            pods=tuple(sorted(gpu.pods)),
        )


def _evidence(
    uuid: str, facts: NodeFacts, kind: str, code: int, onset: Onset, boot: str
) -> Evidence:
    return Evidence(
        machine=facts.machine,
        gpu=uuid,
        kind=kind,
        code=code,
        first_seen=round(onset.at, 3),
        boot=boot,
        appeared=onset.appeared,
    )


def _gpu(uuid: str, gpu: GpuMemory) -> str:
    return f"GPU {gpu.index} ({uuid})" if gpu.index else f"GPU {uuid}"


def _silence(memory: NodeMemory, limits: Limits) -> tuple[str, str]:
    if memory.failure is not None and memory.failures >= limits.silent_scrapes:
        since = shown_time(memory.failing_since)
        if memory.failure.kind is FailureKind.CONTESTED:
            said = f"since {since} {memory.failure.message}; the state of its GPUs is unknown"
            return REASON_CONTESTED, f"{said}. {LEAVE_ONE}"
        if memory.failure.kind is FailureKind.NO_GPUS:
            said = f"since {since} {memory.failure.message}; the state of its GPUs is unknown"
            return REASON_SILENT, said
        said = f"every scrape since {since} failed: {memory.failure.message}"
        return REASON_SILENT, f"{said}; the state of its GPUs is unknown"
    if memory.energy_moved is not None and not memory.failures and _is_frozen(memory, limits):
        since = shown_time(memory.energy_moved)
        said = f"the exporter answers, but no GPU's energy counter has risen since {since}: restart dcgm-exporter"
        return REASON_FROZEN, f"{said}; the state of its GPUs is unknown"
    return "", ""


def _is_frozen(memory: NodeMemory, limits: Limits) -> bool:
    """Whether the pages of a long time show the same energy. Time in which no page was read, or in
    which a clock was set, does not count.
    """
    moved, read = memory.moved_steady, memory.good_steady
    return moved is not None and read is not None and read - moved > limits.frozen


def _doubt(
    memory: NodeMemory, claims: list[Claim], died_at: float | None, limits: Limits, now: float
) -> str:
    """Why the node is suspect after a rank's death; empty if it is not.

    It is suspect until a later page shows every GPU, but only for a limited time: an exporter that
    is silent for another reason must not keep a slot empty.
    """
    watched = memory.last_good is not None
    if died_at is None or not watched or abs(now - died_at) > limits.doubt:
        return ""
    missing = any(claim.evidence.kind == MISSING for claim in claims)
    if not missing and memory.sampled_after is not None and memory.sampled_after > died_at:
        return ""
    return (
        f"a rank died here at {shown_time(died_at)} and no later page of the exporter "
        "has shown all GPUs yet"
    )
