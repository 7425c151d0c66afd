"""The operator's metrics, as Prometheus text. Job figures are read from the statuses when scraped."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from everstep_operator.cost_metrics import LABELS, Costs
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.kube import Kube
from everstep_operator.world import World

USUAL_CAUSES = (
    "ContainerEnded", "NodeGone", "NodeLeaving", "NodeLost", "PodDeleted", "PodEvicted", "UserError",
    "WorkerCrashed", "WorkerDied", "WorkerHung",
)  # fmt: skip
"""Exported for each job from the start: Prometheus sees an increase only in a series that already
exists.
"""


class Metrics:
    """`leads` returns whether this replica acts; only the replica that acts reports jobs and nodes.
    `count_silent` returns the number of silent nodes.
    """

    def __init__(
        self,
        ports: Iterable[Kube],
        world: World,
        leads: Callable[[], bool],
        observe_only: bool,
        count_silent: Callable[[], int] = lambda: 0,
    ) -> None:
        self.registry = CollectorRegistry()
        Gauge(
            "everstep_operator_leader", "1: this replica acts; 0: standby.", registry=self.registry
        ).set_function(lambda: float(leads()))
        Gauge(
            "everstep_operator_observe_only",
            "1: nodes are not changed.",
            registry=self.registry,
        ).set(observe_only)
        self._passes = Counter(
            "everstep_operator_passes", "Passes over a job.", ["outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "everstep_operator_pass_seconds", "Duration of a pass.", registry=self.registry
        )
        self._actions = Counter(
            "everstep_operator_actions", "Actions done.", ["action"], registry=self.registry
        )
        self.registry.register(_Api(ports))
        self.registry.register(_Jobs(world, leads))
        self.registry.register(Costs(world, leads))
        self.registry.register(_SilentNodes(leads, count_silent))

    def count_pass(self, outcome: str, seconds: float) -> None:
        self._passes.labels(outcome).inc()
        self._seconds.observe(seconds)

    def count_action(self, action: str) -> None:
        self._actions.labels(action).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Api(Collector):
    def __init__(self, ports: Iterable[Kube]) -> None:
        self._ports = {port.identity: port for port in ports}

    def collect(self) -> Iterator[Any]:
        calls = CounterMetricFamily(
            "everstep_operator_api_calls",
            "Calls to the API server.",
            labels=("identity", "verb", "outcome"),
        )
        for identity, port in self._ports.items():
            for (verb, outcome), count in port.calls.items():
                calls.add_metric((identity, verb, outcome), count)
        yield calls
        buckets = {id(port.bucket): port.bucket for port in self._ports.values()}
        yield CounterMetricFamily(
            "everstep_operator_api_wait_seconds",
            "Time that writes waited for the token bucket.",
            value=sum(bucket.waited_seconds for bucket in buckets.values()),
        )


class _SilentNodes(Collector):
    def __init__(self, leads: Callable[[], bool], count: Callable[[], int]) -> None:
        self._leads, self._count = leads, count

    def collect(self) -> Iterator[Any]:
        if self._leads():
            yield GaugeMetricFamily(
                "everstep_silent_nodes",
                "Nodes whose lease is not renewed while those of others are.",
                value=self._count(),
            )


class _Jobs(Collector):
    """One sample per job and figure; no pod names, so the number of series stays small."""

    def __init__(self, world: World, leads: Callable[[], bool]) -> None:
        self._world, self._leads = world, leads

    def collect(self) -> Iterator[Any]:
        if self._leads():
            yield from self._collect()

    def _collect(self) -> Iterator[Any]:
        state = GaugeMetricFamily(
            "everstep_job_state", "1 for the state the job is in.", labels=(*LABELS, "state")
        )
        restarts = CounterMetricFamily(
            "everstep_job_restarts", "Interruptions by cause.", labels=(*LABELS, "cause")
        )
        interruptions = CounterMetricFamily(
            "everstep_job_interruptions", "Interruptions, each counted once.", labels=LABELS
        )
        figures = {name: GaugeMetricFamily(name, text, labels=LABELS) for name, text in _FIGURES}
        for job in self._world.jobs:
            labels = (job["metadata"]["namespace"], job["metadata"]["name"])
            status = job.get("status") or {}
            state.add_metric((*labels, status.get("state", "New")), 1)
            for name, value in _values(status):
                figures[name].add_metric(labels, value)
            for cause, count in _count_restarts(status).items():
                restarts.add_metric((*labels, cause), count)
            interruptions.add_metric(labels, _count_interruptions(status))
        yield state
        yield restarts
        yield interruptions
        yield from figures.values()


def _count_interruptions(status: dict[str, Any]) -> int:
    """A counter must not decrease, so those that were later joined to another one still count."""
    restarts = status.get("restarts") or {}
    return int(restarts.get("total") or 0) + int(restarts.get("joined") or 0)


def _count_restarts(status: dict[str, Any]) -> dict[str, int]:
    """Cause → restarts. A counter must not decrease, so a restart that was later attributed to
    another cause counts under both.
    """
    restarts = status.get("restarts") or {}
    now, moved = restarts.get("byCause") or {}, restarts.get("movedByCause") or {}
    causes = sorted({*USUAL_CAUSES, *now, *moved})
    return {c: int(now.get(c, 0)) + int(moved.get(c, 0)) for c in causes}


_FIGURES = (
    ("everstep_job_step", "Furthest step that every member has applied."),
    ("everstep_job_epoch", "Epoch of the running job."),
    ("everstep_job_loss", "Loss of that step."),
    ("everstep_job_ready_workers", "Pods whose workers are members of the epoch."),
    ("everstep_job_desired_workers", "Pods wanted."),
    ("everstep_job_checkpoint_step", "Step of the newest committed checkpoint."),
    ("everstep_job_checkpoint_bytes", "Its size."),
    ("everstep_job_checkpoint_timestamp_seconds", "When it was committed."),
    ("everstep_job_checkpoint_healthy", "Condition CheckpointHealthy; absent while unknown."),
    ("everstep_job_goodput_ratio", "Share of worker seconds spent in steps."),
)


def _values(status: dict[str, Any]) -> Iterator[tuple[str, float]]:
    world, checkpoint = status.get("world") or {}, status.get("checkpoint") or {}
    found = {
        "everstep_job_step": status.get("step"),
        "everstep_job_epoch": status.get("epoch"),
        "everstep_job_loss": status.get("loss"),
        "everstep_job_ready_workers": world.get("ready"),
        "everstep_job_desired_workers": world.get("desired"),
        "everstep_job_checkpoint_step": checkpoint.get("step"),
        "everstep_job_checkpoint_bytes": checkpoint.get("bytes"),
        "everstep_job_checkpoint_timestamp_seconds": to_seconds(checkpoint.get("committedAt")),
        "everstep_job_checkpoint_healthy": _health(status),
        "everstep_job_goodput_ratio": _read_share(status.get("goodput")),
    }
    yield from ((name, float(value)) for name, value in found.items() if value is not None)


def _read_share(text: str | None) -> float | None:
    """98.4% → 0.984. A text that was edited by hand counts as none: it must not break the page of all jobs."""
    try:
        return float((text or "").rstrip("%")) / 100
    except ValueError:
        return None


def _health(status: dict[str, Any]) -> float | None:
    found = [c for c in status.get("conditions") or () if c.get("type") == "CheckpointHealthy"]
    return {"True": 1.0, "False": 0.0}.get(found[0].get("status")) if found else None
