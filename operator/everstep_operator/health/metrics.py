"""The loop's metrics, as Prometheus text."""

from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from everstep_operator.fleet.observed import Observed, Policy
from everstep_operator.health.outcomes import Scrape, ScrapeFailure
from everstep_operator.quarantines import Quarantine
from everstep_operator.values import NodeState, NodeVerdict


class HealthMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._scrapes = Counter(
            "everstep_exporter_scrapes", "Scrapes by outcome", ["outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "everstep_exporter_scrape_seconds", "Duration of a scrape", registry=self.registry
        )
        self._pass_seconds = Histogram(
            "everstep_fleet_pass_seconds", "Duration of a fleet pass", registry=self.registry
        )
        self._watched = Gauge(
            "everstep_gpu_nodes_watched", "GPU nodes with an exporter", registry=self.registry
        )
        self._gpu_nodes = Gauge("everstep_gpu_nodes", "Nodes with GPUs", registry=self.registry)
        self._budget = Gauge(
            "everstep_quarantine_budget", "Nodes that may be quarantined", registry=self.registry
        )
        self._quarantines = Gauge(
            "everstep_quarantines", "NodeQuarantines by state", ["state"], registry=self.registry
        )
        self._put_back = Gauge(
            "everstep_quarantines_put_back",
            "NodeQuarantines that had been lost and were recreated",
            registry=self.registry,
        )
        self._verdicts = Gauge(
            "everstep_node_verdicts", "Nodes by verdict", ["state"], registry=self.registry
        )
        self._beyond = Gauge(
            "everstep_node_verdicts_over_budget",
            "Faulty nodes beyond the cordon budget: only suspect, jobs stay",
            registry=self.registry,
        )
        self._info = Gauge(
            "everstep_node_verdict_info",
            "1 for each node with a verdict",
            ["node", "state", "reason"],
            registry=self.registry,
        )
        self._ages = Gauge(
            "everstep_exporter_scrape_age_seconds",
            "Since the last good page of the node's exporter",
            ["node"],
            registry=self.registry,
        )
        self._actions = Counter(
            "everstep_fleet_actions", "Actions done on nodes", ["action"], registry=self.registry
        )

    def note_scrapes(self, scrapes: Iterable[Scrape], watched: int) -> None:
        self._watched.set(watched)
        for scrape in scrapes:
            failed = isinstance(scrape.outcome, ScrapeFailure)
            outcome = (
                scrape.outcome.kind.value if isinstance(scrape.outcome, ScrapeFailure) else "ok"
            )
            self._scrapes.labels(outcome).inc()
            if not failed:
                self._seconds.observe(scrape.seconds)

    def note_ages(self, good: Mapping[str, float | None], clock: Callable[[], float]) -> None:
        """`good`: node → when its last good page was requested; None: never."""
        self._ages.clear()
        for node, at in good.items():
            if at is not None:
                self._ages.labels(node).set_function(partial(_age, at, clock))

    def note_pass(
        self, observed: Observed, policy: Policy, done: Iterable[str], seconds: float
    ) -> None:
        self._pass_seconds.observe(seconds)
        gpu_nodes = observed.roster.gpu_nodes
        self._gpu_nodes.set(gpu_nodes)
        self._budget.set(policy.budget.limit(gpu_nodes))
        if observed.quarantines is not None:
            self._note_quarantines(observed.quarantines)
        for action in done:
            self._actions.labels(action).inc()

    def _note_quarantines(self, quarantines: Collection[Quarantine]) -> None:
        counts = Counts(q.state or "Pending" for q in quarantines)
        self._quarantines.clear()
        for state, count in counts.items():
            self._quarantines.labels(state).set(count)
        self._put_back.set(sum(bool(q.put_back) for q in quarantines))

    def note_verdicts(self, verdicts: Mapping[str, NodeVerdict]) -> None:
        for state in NodeState:
            count = sum(verdict.state is state for verdict in verdicts.values())
            self._verdicts.labels(state.value).set(count)
        self._beyond.set(sum(verdict.over_budget for verdict in verdicts.values()))
        self._info.clear()
        for node, verdict in verdicts.items():
            self._info.labels(node, verdict.state.value, verdict.reason).set(1)

    def render(self) -> str:
        return generate_latest(self.registry).decode()


def _age(at: float, clock: Callable[[], float]) -> float:
    return max(0.0, clock() - at)
