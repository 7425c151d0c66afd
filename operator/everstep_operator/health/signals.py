"""A node's memory of its GPUs: a pure fold over scrapes.

A latching gauge shows a value long after the fault, so what counts is its *onset*: when it
appeared, and whether it was seen to appear or was already present. An onset lasts until the
exporter clears it (a reset or a reboot clears the latch). A code that a later one replaces in the
gauge stays, because the gauge holds only the last XID.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.evidence import MISSING
from everstep_operator.health.outcomes import FailureKind, Scrape, ScrapeFailure
from everstep_operator.health.parse import GpuSample, Page
from everstep_operator.health.rules.reading import Change, Reading, Values
from everstep_operator.health.rules.registry import Rule, Rules
from everstep_operator.nodes import NodeFacts, choose_expected

NO_GPUS = (
    "the exporter's pages show no GPU, only other series: run nvidia-smi on the node, and restart dcgm-exporter if "
    "it lists the GPUs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Derived from the scrape interval; seconds, except the counts."""

    missing_scrapes: int = 3
    """A GPU counts as gone after so many consecutive good pages without it."""
    silent_scrapes: int = 3
    """An exporter counts as silent after so many consecutive failed scrapes."""
    same_fault: float = 45.0
    """Gauge and windowed count of one fault may arrive this far apart."""
    frozen: float = 120.0
    """If no GPU of a node has used energy for this long, the exporter's values count as frozen."""
    doubt: float = 60.0
    """How long a death keeps its node suspect while no page can clear it."""
    sampling: float = 30.0
    """Maximum age of a page's values if the page does not show it (the exporter's default
    interval).
    """


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


FaultKey = tuple[str, int]
"""Kind and code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    index: str = ""
    seen: bool = False
    """A page has shown it; False: known only from the node's annotation."""
    kept: Mapping[str, Values] = field(default_factory=lambda: MappingProxyType({}))
    """Kind → what its rule keeps for the next page."""
    shown: frozenset[str] = frozenset()
    """Kinds whose metrics the newest page had that showed the GPU."""
    energy: float | None = None
    onsets: Mapping[FaultKey, Onset] = field(default_factory=lambda: MappingProxyType({}))
    missing: int = 0
    """Consecutive good pages without it."""
    missing_since: float = 0.0
    pods: frozenset[str] = frozenset()
    """The pods that held it, according to the newest page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    machine: str = ""
    boot: str = ""
    gpus: Mapping[str, GpuMemory] = field(default_factory=lambda: MappingProxyType({}))
    present: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()
    """GPUs whose place a new one has taken, whatever the node's annotation still lists."""
    last_good: float | None = None
    """When the newest good page was requested."""
    sampled_after: float | None = None
    """The newest page's values were sampled after this time."""
    good_steady: float | None = None
    """`last_good` on the monotonic clock."""
    sampled_steady: float | None = None
    """`sampled_after` on the monotonic clock."""
    energy_moved: float | None = None
    """When a GPU's energy last increased; None: never seen."""
    moved_steady: float | None = None
    """`energy_moved` on the monotonic clock."""
    failures: int = 0
    """Consecutive."""
    empty: int = 0
    """Consecutive pages without a GPU; those that may repeat one sample count once."""
    empty_since: float = 0.0
    """When the first of them was requested, on the monotonic clock."""
    failing_since: float = 0.0
    failure: ScrapeFailure | None = None


def remember(
    memory: NodeMemory, scrape: Scrape, facts: NodeFacts, rules: Rules, limits: Limits
) -> NodeMemory:
    memory = of_this_boot(memory, facts, rules)
    outcome = scrape.outcome
    if isinstance(outcome, Page) and not outcome.gpus and (facts.has_gpus or memory.gpus):
        outcome = ScrapeFailure(kind=FailureKind.NO_GPUS, message=NO_GPUS)
    if isinstance(outcome, ScrapeFailure):
        return _remember_failure(memory, scrape, outcome, limits)
    return _Fold(rules, limits).remember_page(memory, scrape, outcome, facts)


def of_this_boot(memory: NodeMemory, facts: NodeFacts, rules: Rules) -> NodeMemory:
    """The memory without what ended with an earlier boot: latches, counters and absences.

    Faults that outlive a boot stay. The list of GPUs stays as long as the machine is the same, except
    those that a person has given up.
    """
    if memory.machine != facts.machine:
        return NodeMemory(machine=facts.machine, boot=facts.boot)
    if memory.boot == facts.boot:
        return memory
    gpus = {
        uuid: GpuMemory(index=gpu.index, seen=gpu.seen, onsets=_lasting(gpu, rules))
        for uuid, gpu in memory.gpus.items()
        if not _is_given_up(uuid, facts)
    }
    return NodeMemory(machine=facts.machine, boot=facts.boot, gpus=MappingProxyType(gpus))


def _is_given_up(uuid: str, facts: NodeFacts) -> bool:
    """Whether a person has released the node without this GPU, and no page has shown it since: then
    the node is not expected to have it, in this boot or a later one.
    """
    answered = any(one.kind == MISSING and one.gpu == uuid for one in facts.answered)
    return answered and uuid not in facts.expected


def _lasting(gpu: GpuMemory, rules: Rules) -> Mapping[FaultKey, Onset]:
    lasting = {rule.kind for rule in rules if rule.outlives_boot}
    return MappingProxyType({key: o for key, o in gpu.onsets.items() if key[0] in lasting})


def _remember_failure(
    memory: NodeMemory, scrape: Scrape, failure: ScrapeFailure, limits: Limits
) -> NodeMemory:
    empty, empty_since = _count_empty(memory, scrape, failure, limits)
    return replace(
        memory,
        failures=memory.failures + 1,
        empty=empty,
        empty_since=empty_since,
        failing_since=memory.failing_since if memory.failures else scrape.started,
        failure=failure,
    )


def _count_empty(
    memory: NodeMemory, scrape: Scrape, failure: ScrapeFailure, limits: Limits
) -> tuple[int, float]:
    """Consecutive pages without a GPU, and since when. An exporter that has just started has not collected
    yet, and one whose collection failed is empty until the next one, however often it is asked.
    """
    if not failure.answers:
        return 0, 0.0
    if not memory.empty:
        return 1, scrape.steady
    collected = scrape.steady - memory.empty_since >= memory.empty * limits.sampling
    return memory.empty + collected, memory.empty_since


@dataclass(frozen=True, slots=True)
class _Fold:
    rules: Rules
    limits: Limits

    def remember_page(
        self, memory: NodeMemory, scrape: Scrape, page: Page, facts: NodeFacts
    ) -> NodeMemory:
        at = scrape.started
        moved = any(_energy_grew(memory.gpus.get(u), sample) for u, sample in page.gpus.items())
        undated = all(sample.energy is None for sample in page.gpus.values())
        known = {*facts.expected, *memory.gpus} - memory.swapped
        uuids = choose_expected(known, page.gpus.keys())
        gpus = {
            uuid: self._remember_gpu(memory.gpus.get(uuid), page.gpus.get(uuid), at, moved, undated)
            for uuid in sorted(uuids)
        }
        sampled_after, sampled_steady = _sampled(memory, scrape, page, moved, self.limits)
        return replace(
            memory,
            gpus=MappingProxyType(gpus),
            present=frozenset(page.gpus),
            swapped=(memory.swapped | (known - uuids)) - page.gpus.keys(),
            last_good=at,
            good_steady=scrape.steady,
            sampled_after=sampled_after,
            sampled_steady=sampled_steady,
            energy_moved=at if moved else memory.energy_moved,
            moved_steady=scrape.steady if moved else memory.moved_steady,
            failures=0,
            empty=0,
            failing_since=0.0,
            failure=None,
        )

    def _remember_gpu(
        self,
        gpu: GpuMemory | None,
        sample: GpuSample | None,
        at: float,
        moved: bool,
        undated: bool,
    ) -> GpuMemory:
        """`moved`: the page shows a newer sample than the last one; `undated`: it has no energy, so
        nothing shows that. Exporters serve one sample for many requests, and it counts once.
        """
        gpu = gpu or GpuMemory()
        fresh = moved or (undated and self._has_sampled_again(gpu, at))
        if sample is None and gpu.missing and not fresh:
            return gpu
        if sample is None:
            since = gpu.missing_since if gpu.missing else at
            return replace(gpu, missing=gpu.missing + 1, missing_since=since)
        changes = {rule.kind: _read(rule, gpu, sample) for rule in self.rules}
        return GpuMemory(
            index=sample.index or gpu.index,
            seen=True,
            kept=MappingProxyType({kind: change.kept for kind, change in changes.items()}),
            shown=frozenset(
                r.kind for r in self.rules if not sample.values.keys().isdisjoint(r.metrics)
            ),
            energy=sample.energy if sample.energy is not None else gpu.energy,
            onsets=MappingProxyType(self._onsets(gpu, changes, at)),
            pods=sample.pods,
        )

    def _has_sampled_again(self, gpu: GpuMemory, at: float) -> bool:
        """Whether the exporter has had the time to collect once more since the last page that counts."""
        return at - gpu.missing_since >= gpu.missing * self.limits.sampling

    def _onsets(
        self, gpu: GpuMemory, changes: Mapping[str, Change], at: float
    ) -> dict[FaultKey, Onset]:
        """A fault on the first page that shows its GPU counts as present, not as seen to appear."""
        ended = {(kind, code) for kind, change in changes.items() for code in change.ended}
        held = {key: onset for key, onset in gpu.onsets.items() if key not in ended}
        for kind, change in changes.items():
            for code in change.risen:
                old = held.get((kind, code))
                if old is None or (gpu.seen and at - old.at > self.limits.same_fault):
                    held[kind, code] = Onset(at=at, appeared=gpu.seen)
        return held


def _read(rule: Rule, gpu: GpuMemory, sample: GpuSample) -> Change:
    reading = Reading(
        now={metric: sample.values[metric] for metric in rule.metrics if metric in sample.values},
        before=gpu.kept.get(rule.kind, {}),
        standing=tuple(code for kind, code in gpu.onsets if kind == rule.kind),
        live=sample.energy is not None or gpu.energy is None,
    )
    return rule.read(reading)


def _sampled(
    memory: NodeMemory, scrape: Scrape, page: Page, moved: bool, limits: Limits
) -> tuple[float | None, float | None]:
    """The earliest time at which the page's values were sampled, by both clocks.

    Exporters serve their last sample. If a GPU's energy has increased since the last page, the
    sample is newer than the request for that page.
    """
    if moved:
        return memory.last_good, memory.good_steady
    if any(sample.energy is not None for sample in page.gpus.values()):
        return memory.sampled_after, memory.sampled_steady
    return scrape.started - limits.sampling, scrape.steady - limits.sampling


def _energy_grew(gpu: GpuMemory | None, sample: GpuSample) -> bool:
    held = gpu.energy if gpu is not None else None
    return held is not None and sample.energy is not None and sample.energy != held
