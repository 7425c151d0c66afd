"""Builders for tests of health and fleet: nodes, pages, and a node's history with a fake clock."""

from dataclasses import dataclass, field, replace
from typing import Any

from everstep_operator.evidence import Evidence, Finding
from everstep_operator.health import decide, signals
from everstep_operator.health.outcomes import FailureKind, Scrape, ScrapeFailure
from everstep_operator.health.parse import GpuSample, Page
from everstep_operator.health.rules.registry import load_rules
from everstep_operator.nodes import NodeFacts

NODE = "node-1"
A, B = "GPU-a", "GPU-b"
RULES = load_rules()
LIMITS = signals.build_limits(1.0)
START = 1_000_000.0


def a_node(**changes: Any) -> NodeFacts:
    given = NodeFacts(
        name=NODE,
        uid="uid-1",
        version="1",
        machine="machine-1",
        boot="boot-1",
        gpus=2,
        allocatable=2,
    )
    return replace(given, **changes)


def a_gpu(uuid: str, **changes: Any) -> GpuSample:
    """`changes` may have xid, xid_counts, double_bit, remap_failed, or fields of the sample."""
    index = "01"["ab".index(uuid[-1])]
    shown: dict[str, dict[int, float]] = {
        "DCGM_FI_DEV_XID_ERRORS": {0: changes.pop("xid", 0)},
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": {0: changes.pop("double_bit", 0.0)},
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": {0: float(changes.pop("remap_failed", False))},
        "DCGM_EXP_XID_ERRORS_COUNT": changes.pop("xid_counts", {}),
    }
    values = {metric: codes for metric, codes in shown.items() if codes}
    return replace(GpuSample(uuid=uuid, index=index, values=values), **changes)


def a_page(*gpus: GpuSample) -> Page:
    return Page(gpus={gpu.uuid: gpu for gpu in gpus}, hostname=NODE)


HEALTHY = a_page(a_gpu(A), a_gpu(B))


def a_failure(kind: FailureKind = FailureKind.REFUSED) -> ScrapeFailure:
    return ScrapeFailure(kind=kind, message=f"http://node-1:9400/metrics: {kind.value}")


@dataclass(slots=True)
class History:
    """One observed node, with scrapes one second apart."""

    facts: NodeFacts = field(default_factory=a_node)
    now: float = START
    steady: float = 0.0
    memory: signals.NodeMemory = field(default_factory=signals.NodeMemory)
    died_at: float | None = None
    energy: float = 0.0
    dated: bool = True
    """Whether the exporter exports the energy counter."""

    def scrape(self, *outcomes: Page | ScrapeFailure, moving: bool = True) -> "History":
        """Scrape once per outcome. With `moving`, every GPU has used energy since the last page."""
        for outcome in outcomes:
            self.now, self.steady = self.now + 1.0, self.steady + 1.0
            self.energy += 300.0 if moving else 0.0
            shown = self._with_energy(outcome) if isinstance(outcome, Page) else outcome
            scrape = Scrape(
                node=self.facts.name,
                started=self.now,
                steady=self.steady,
                seconds=0.01,
                outcome=shown,
            )
            self.memory = signals.remember(self.memory, scrape, self.facts, RULES, LIMITS)
        return self

    def _with_energy(self, page: Page) -> Page:
        energy = self.energy if self.dated else None
        gpus = {u: replace(gpu, energy=energy) for u, gpu in page.gpus.items()}
        return replace(page, gpus=gpus)

    def restarted(self) -> "History":
        """Restart the operator, which then knows only what is recorded on the node."""
        self.memory = signals.NodeMemory()
        self.died_at = None
        return self

    def rebooted(self, boot: str = "boot-2") -> "History":
        self.facts = replace(self.facts, boot=boot)
        return self

    def answered(self, *evidence: Evidence) -> "History":
        self.facts = replace(self.facts, answered=(*self.facts.answered, *evidence))
        return self

    def finding(self) -> Finding:
        return decide.decide_node(
            self.memory,
            self.facts,
            rules=RULES,
            limits=LIMITS,
            now=self.now,
            died_at=self.died_at,
        )

    def evidence(self) -> list[Evidence]:
        return [claim.evidence for claim in self.finding().claims]

    def states(self) -> list[str]:
        return [claim.state.value for claim in self.finding().claims]
