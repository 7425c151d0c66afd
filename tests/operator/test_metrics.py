"""The page of the operator's metrics, read as Prometheus reads it."""

import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from everstep_operator.jobs.recoveries import BOUNDS
from everstep_operator.metrics import Metrics
from everstep_operator.world import World

RECOVERIES = [
    {"rung": "regroup", "count": 12, "seconds": 3.6, "stepsLost": 0, "within": {"0.2": 2, "0.5": 10}},
    {"rung": "restart", "count": 1, "seconds": 640.0, "stepsLost": 7, "within": {"+Inf": 1}},
]  # fmt: skip


def a_world(**status: Any) -> World:
    world = World()
    metadata = {"namespace": "team", "name": "lm", "uid": "u1", "resourceVersion": "1"}
    world.jobs.put({"metadata": metadata, "status": status})
    return world


def a_replica(world: World, *, leads: bool = True) -> Metrics:
    return Metrics((), world, lambda: leads, observe_only=False)


def read(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """(name of the sample, values of its other labels) → value, for the job team/lm."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples if family.name == name else ():
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("job")) == ("team", "lm")
            found[sample.name, *(labels[k] for k in sorted(labels))] = sample.value
    return found


def test_recovery_seconds_are_a_histogram_by_rung() -> None:
    found = read(a_replica(a_world(recoveries=RECOVERIES)), "everstep_recovery_seconds")
    assert found["everstep_recovery_seconds_count", "regroup"] == 12
    assert found["everstep_recovery_seconds_sum", "regroup"] == 3.6
    buckets = {float(k[1]): v for k, v in found.items() if k[2:] == ("regroup",)}
    assert list(buckets) == list(BOUNDS)
    assert [buckets[b] for b in (0.1, 0.2, 0.5, 1.0, math.inf)] == [0, 2, 12, 12, 12]
    longest = {float(k[1]): v for k, v in found.items() if k[2:] == ("restart",)}
    assert (longest[600.0], longest[math.inf]) == (0, 1)


def test_the_usual_rungs_are_there_before_the_first_recovery() -> None:
    """Prometheus does not count the increase from no series to 1."""
    found = read(a_replica(a_world(step=3)), "everstep_recovery_seconds")
    counts = {k[1]: v for k, v in found.items() if k[0].endswith("_count")}
    assert counts == {"regroup": 0, "restart": 0, "move": 0}
    assert read(a_replica(a_world(step=3)), "everstep_job_steps_lost") == {
        ("everstep_job_steps_lost_total",): 0
    }


def test_counts_of_bounds_that_another_version_had_go_to_the_next_larger_bound() -> None:
    old = [
        {"rung": "move", "count": 3, "seconds": 9.0, "within": {"0.3": 2, "900.0": 1, "by hand": 1}}
    ]
    found = read(a_replica(a_world(recoveries=old)), "everstep_recovery_seconds")
    buckets = {float(k[1]): v for k, v in found.items() if k[2:] == ("move",)}
    assert [buckets[b] for b in (0.2, 0.5, 600.0, math.inf)] == [0, 2, 2, 4]


def test_steps_lost_are_a_counter_over_all_rungs() -> None:
    found = read(a_replica(a_world(recoveries=RECOVERIES)), "everstep_job_steps_lost")
    assert found == {("everstep_job_steps_lost_total",): 7}


def test_a_restarted_operator_and_a_standby_count_nothing_twice() -> None:
    world = a_world(recoveries=RECOVERIES)
    first, next_one = a_replica(world), a_replica(world)
    for name in ("everstep_recovery_seconds", "everstep_job_steps_lost"):
        assert read(first, name) == read(first, name) == read(next_one, name)
        assert read(a_replica(world, leads=False), name) == {}


def test_worker_seconds_are_told_by_category() -> None:
    metrics = a_replica(a_world(seconds={"step": 98.0, "data": 1.5}))
    assert read(metrics, "everstep_job_worker_seconds") == {
        ("everstep_job_worker_seconds", "step"): 98.0,
        ("everstep_job_worker_seconds", "data"): 1.5,
    }


def test_seconds_of_spares_are_a_counter() -> None:
    name = "everstep_job_spare_seconds"
    assert read(a_replica(a_world(spareSeconds=7200)), name) == {(f"{name}_total",): 7200.0}
    assert read(a_replica(a_world()), name) == {}, "the job has had no spare"


def test_goodput_is_a_ratio() -> None:
    found = read(a_replica(a_world(goodput="98.4%")), "everstep_job_goodput_ratio")
    assert found == {("everstep_job_goodput_ratio",): pytest.approx(0.984)}


def test_a_status_that_was_edited_by_hand_leaves_the_page_whole() -> None:
    metrics = a_replica(a_world(goodput="good", step=7))
    assert read(metrics, "everstep_job_goodput_ratio") == {}
    assert read(metrics, "everstep_job_step") == {("everstep_job_step",): 7}


def test_the_page_is_what_the_registry_of_the_client_library_holds() -> None:
    metrics = a_replica(a_world(recoveries=RECOVERIES))
    assert isinstance(metrics.registry, CollectorRegistry)
    parsed = {f.name: f.type for f in text_string_to_metric_families(metrics.render().decode())}
    held = {f.name: f.type for f in metrics.registry.collect()}
    assert {"everstep_recovery_seconds", "everstep_job_steps_lost"} <= held.keys()
    assert held.items() <= parsed.items()
