"""What interruptions have cost the jobs, as metrics. All are totals from the jobs' statuses, so
neither a restart of the operator nor a new leader counts anything twice.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from everstep_operator.jobs.recoveries import BOUNDS, describe_bound
from everstep_operator.model_status import RecoveryTotal
from everstep_operator.world import World

LABELS = ("namespace", "job")
USUAL_RUNGS = ("regroup", "restart", "move")
"""Exported for each job from the start: Prometheus sees an increase only in a series that already
exists.
"""


class Costs(Collector):
    def __init__(self, world: World, leads: Callable[[], bool]) -> None:
        self._world, self._leads = world, leads

    def collect(self) -> Iterator[Any]:
        if self._leads():
            yield from self._collect()

    def _collect(self) -> Iterator[Any]:
        recoveries = HistogramMetricFamily(
            "everstep_recovery_seconds",
            "Seconds without a step of any rank, for each interruption that is over.",
            labels=(*LABELS, "rung"),
        )
        lost = CounterMetricFamily(
            "everstep_job_steps_lost", "Steps that had to be repeated.", labels=LABELS
        )
        seconds = GaugeMetricFamily(
            "everstep_job_worker_seconds",
            "Seconds of all workers so far, by what they were spent on.",
            labels=(*LABELS, "category"),
        )
        spares = CounterMetricFamily(
            "everstep_job_spare_seconds",
            "Seconds for which spares have held a node, added up over pods.",
            labels=LABELS,
        )
        for job in self._world.jobs:
            labels = (job["metadata"]["namespace"], job["metadata"]["name"])
            status = job.get("status") or {}
            totals = [RecoveryTotal.model_validate(t) for t in status.get("recoveries") or ()]
            for total in _with_usual(totals):
                buckets = _accumulate(total.within)
                recoveries.add_metric((*labels, total.rung), buckets, total.seconds)
            lost.add_metric(labels, sum(total.steps_lost for total in totals))
            for category, spent in (status.get("seconds") or {}).items():
                seconds.add_metric((*labels, category), spent)
            if "spareSeconds" in status:
                spares.add_metric(labels, status["spareSeconds"])
        yield from (recoveries, lost, seconds, spares)


def _with_usual(totals: Iterable[RecoveryTotal]) -> list[RecoveryTotal]:
    found = {rung: RecoveryTotal(rung=rung) for rung in USUAL_RUNGS}
    return list((found | {total.rung: total for total in totals}).values())


def _accumulate(within: Mapping[str, int]) -> list[tuple[str, float]]:
    """Build a histogram's buckets: each upper bound, with the number of recoveries within it.

    Counts for a bound that only another version of the operator used go to the next larger bound.
    """
    counted = [(_read_bound(key), count) for key, count in within.items()]
    return [(describe_bound(b), sum(n for bound, n in counted if bound <= b)) for b in BOUNDS]


def _read_bound(key: str) -> float:
    """An invalid key counts as infinity: one that was edited by hand must not break the page."""
    with contextlib.suppress(ValueError):
        return float(key)
    return math.inf
