"""What is remembered of a node's GPUs: a pure fold over scrapes.

A gauge that latches shows a value long after the fault, so what counts is its *onset*: when it
appeared, and whether we saw it appear or found it standing there. An onset lasts until the exporter
takes it back (a reset or a reboot clears the latch); a code that a later one overwrites stays,
because the gauge holds the last XID only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.evidence import Kind
from everstep_operator.health.outcomes import Scrape, ScrapeFailure
from everstep_operator.health.parse import GpuSample, Page
from everstep_operator.nodes import NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Derived from the scrape interval, all in seconds but the counts."""

    missing_scrapes: int = 3
    """Good pages in a row without a GPU until it counts as gone."""
    silent_scrapes: int = 3
    """Failed scrapes in a row until the exporter counts as silent."""
    same_fault: float = 45.0
    """Gauge and windowed count of one fault may reach us this far apart."""
    frozen: float = 120.0
    """No GPU of a node used energy for so long: its values are frozen."""
    doubt: float = 60.0
    """How long a death keeps its node suspect while no page can clear it."""
    sampling: float = 30.0
    """How old a page's values may be where they do not show it themselves (the exporter's default
    interval)."""


def build_limits(scrape_seconds: float) -> Limits:
    return Limits(
        same_fault=3 * scrape_seconds,
        frozen=max(120.0, 8 * scrape_seconds),
        doubt=max(15.0, 4 * scrape_seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    at: float
    appeared: bool


FaultKey = tuple[Kind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    index: str = ""
    seen: bool = False
    """A page has shown it; False: only the node's annotation tells of it."""
    xid: int = 0
    counts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    double_bit: float = 0.0
    energy: float | None = None
    onsets: Mapping[FaultKey, Onset] = field(default_factory=lambda: MappingProxyType({}))
    missing: int = 0
    """Good pages in a row that do not show it."""
    missing_since: float = 0.0
    pods: frozenset[str] = frozenset()
    """Who held it, as last said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    machine: str = ""
    boot: str = ""
    gpus: Mapping[str, GpuMemory] = field(default_factory=lambda: MappingProxyType({}))
    present: frozenset[str] = frozenset()
    last_good: float | None = None
    """When the newest good page was asked for."""
    sampled_after: float | None = None
    """The newest page's values were surely sampled after this moment."""
    energy_moved: float | None = None
    """When a GPU's energy last grew; None: never seen to."""
    failures: int = 0
    """In a row."""
    failing_since: float = 0.0
    failure: ScrapeFailure | None = None


def remember(memory: NodeMemory, scrape: Scrape, facts: NodeFacts, limits: Limits) -> NodeMemory:
    memory = of_this_boot(memory, facts)
    if isinstance(scrape.outcome, ScrapeFailure):
        return _remember_failure(memory, scrape, scrape.outcome)
    return _remember_page(memory, scrape, scrape.outcome, facts, limits)


def of_this_boot(memory: NodeMemory, facts: NodeFacts) -> NodeMemory:
    """Latches, counters and absences end with the boot; which GPUs there were stays with the
    machine."""
    if memory.machine != facts.machine:
        return NodeMemory(machine=facts.machine, boot=facts.boot)
    if memory.boot == facts.boot:
        return memory
    gpus = {
        uuid: GpuMemory(index=gpu.index, seen=gpu.seen, onsets=_lasting(gpu))
        for uuid, gpu in memory.gpus.items()
    }
    return NodeMemory(machine=facts.machine, boot=facts.boot, gpus=MappingProxyType(gpus))


def _lasting(gpu: GpuMemory) -> Mapping[FaultKey, Onset]:
    kept = {key: onset for key, onset in gpu.onsets.items() if key[0].outlives_boot}
    return MappingProxyType(kept)


def _remember_failure(memory: NodeMemory, scrape: Scrape, failure: ScrapeFailure) -> NodeMemory:
    return replace(
        memory,
        failures=memory.failures + 1,
        failing_since=memory.failing_since if memory.failures else scrape.started,
        failure=failure,
    )


def _remember_page(
    memory: NodeMemory, scrape: Scrape, page: Page, facts: NodeFacts, limits: Limits
) -> NodeMemory:
    at = scrape.started
    moved = any(_energy_grew(memory.gpus.get(u), sample) for u, sample in page.gpus.items())
    uuids = set(facts.expected) | set(memory.gpus) | set(page.gpus)
    gpus = {
        uuid: _remember_gpu(memory.gpus.get(uuid, GpuMemory()), page.gpus.get(uuid), at, limits)
        for uuid in sorted(uuids)
    }
    return replace(
        memory,
        gpus=MappingProxyType(gpus),
        present=frozenset(page.gpus),
        last_good=at,
        sampled_after=_sampled_after(memory, page, at, moved, limits),
        energy_moved=at if moved else memory.energy_moved,
        failures=0,
        failing_since=0.0,
        failure=None,
    )


def _sampled_after(
    memory: NodeMemory, page: Page, at: float, moved: bool, limits: Limits
) -> float | None:
    """Exporters answer from their last sample. Energy that grew since our last page dates the
    sample."""
    if moved:
        return memory.last_good
    if any(sample.energy is not None for sample in page.gpus.values()):
        return memory.sampled_after
    return at - limits.sampling


def _energy_grew(gpu: GpuMemory | None, sample: GpuSample) -> bool:
    held = gpu.energy if gpu is not None else None
    return held is not None and sample.energy is not None and sample.energy != held


def _remember_gpu(gpu: GpuMemory, sample: GpuSample | None, at: float, limits: Limits) -> GpuMemory:
    if sample is None:
        since = gpu.missing_since if gpu.missing else at
        return replace(gpu, missing=gpu.missing + 1, missing_since=since)
    return GpuMemory(
        index=sample.index or gpu.index,
        seen=True,
        xid=sample.xid if sample.xid is not None else gpu.xid,
        counts=MappingProxyType(dict(sample.xid_counts)),
        double_bit=sample.double_bit if sample.double_bit is not None else gpu.double_bit,
        energy=sample.energy if sample.energy is not None else gpu.energy,
        onsets=MappingProxyType(_onsets(gpu, sample, at, limits)),
        pods=sample.pods,
    )


def _onsets(gpu: GpuMemory, sample: GpuSample, at: float, limits: Limits) -> dict[FaultKey, Onset]:
    held = {key: onset for key, onset in gpu.onsets.items() if not _taken_back(key, gpu, sample)}
    for key, fresh in _risen(gpu, sample).items():
        old = held.get(key)
        if old is None or (fresh and at - old.at > limits.same_fault):
            held[key] = Onset(at=at, appeared=fresh)
    return held


def _taken_back(key: FaultKey, gpu: GpuMemory, sample: GpuSample) -> bool:
    kind, code = key
    if kind is Kind.XID:
        return sample.xid == 0 and not sample.xid_counts.get(code)
    if kind is Kind.DOUBLE_BIT:
        return sample.double_bit is not None and sample.double_bit < gpu.double_bit
    return sample.remap_failed is False


def _risen(gpu: GpuMemory, sample: GpuSample) -> dict[FaultKey, bool]:
    """Faults that this page shows and the last one did not; False for what stood there at first
    sight."""
    risen: dict[FaultKey, bool] = {}
    if sample.xid and sample.xid != gpu.xid:
        risen[Kind.XID, sample.xid] = gpu.seen
    for code, count in sample.xid_counts.items():
        if count > gpu.counts.get(code, 0):
            risen[Kind.XID, code] = gpu.seen
    errors = sample.double_bit or 0.0
    before = gpu.double_bit if errors >= gpu.double_bit else 0.0
    if errors > before:
        risen[Kind.DOUBLE_BIT, 0] = gpu.seen
    if sample.remap_failed and (Kind.REMAP_FAILURE, 0) not in gpu.onsets:
        risen[Kind.REMAP_FAILURE, 0] = gpu.seen
    return risen
