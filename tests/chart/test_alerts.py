"""Which alerts fire for which metrics. A small interpreter of the PromQL that the alerts use; ranges are left out."""

import re
from collections.abc import Callable
from typing import Any

import promql_parser
import pytest
import yaml

from everstep_lab import chart

Sample = tuple[str, dict[str, str], float]
Vector = list[tuple[dict[str, str], float]]
POD = {"instance": "10.0.0.1:8080", "pod": "everstep-operator-a"}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "MatchOp.Equal": lambda found, wanted: found == wanted,
    "MatchOp.NotEqual": lambda found, wanted: found != wanted,
    "MatchOp.Re": lambda found, wanted: bool(re.fullmatch(wanted, found)),
    "MatchOp.NotRe": lambda found, wanted: not re.fullmatch(wanted, found),
}
COMPARES: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def evaluate(node: Any, samples: list[Sample]) -> Vector:
    if isinstance(node, promql_parser.ParenExpr):
        return evaluate(node.expr, samples)
    if isinstance(node, promql_parser.VectorSelector):
        return [
            (labels, value) for n, labels, value in samples if n == node.name and fits(node, labels)
        ]
    assert isinstance(node, promql_parser.BinaryExpr)
    op, left = str(node.op), evaluate(node.lhs, samples)
    if isinstance(node.rhs, promql_parser.NumberLiteral):
        return [(labels, value) for labels, value in left if COMPARES[op](value, node.rhs.val)]
    right = evaluate(node.rhs, samples)
    if op == "or":
        return left + [r for r in right if r[0] not in [labels for labels, _ in left]]
    given = re.fullmatch(r"on \((.*)\)", str(node.modifier.matching)) if node.modifier else None
    on = given[1].split(", ") if given else None
    if op in ("and", "unless"):
        keys = [key(labels, on) for labels, _ in right]
        return [one for one in left if (key(one[0], on) in keys) is (op == "and")]
    by_key = {str(key(labels, on)): value for labels, value in right}
    pairs = [(one, by_key.get(str(key(one[0], on)))) for one in left]
    return [one for one, other in pairs if other is not None and COMPARES[op](one[1], other)]


def key(labels: dict[str, str], on: list[str] | None) -> dict[str, str]:
    return labels if on is None else {name: labels.get(name, "") for name in on}


def fits(node: Any, labels: dict[str, str]) -> bool:
    found = node.matchers.matchers
    return all(MATCHES[str(m.op)](labels.get(m.name, ""), m.value) for m in found)


def read_rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((chart.FOLDER / "files" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def find_firing(*samples: Sample) -> list[str]:
    """The alerts that these metrics of the leader raise, for those alerts that look at no range."""
    plain = [r for r in read_rules() if "increase(" not in r["expr"] and "absent(" not in r["expr"]]
    scraped = [(name, {**POD, **labels}, value) for name, labels, value in samples]
    return [r["alert"] for r in plain if evaluate(promql_parser.parse(r["expr"]), scraped)]


def exporter(reason: str, age: float | None) -> list[Sample]:
    labels = {"node": "n1", "state": "unknown", "reason": reason}
    info: list[Sample] = [("everstep_node_verdict_info", labels, 1)] if reason else []
    ages: list[Sample] = [("everstep_exporter_scrape_age_seconds", {"node": "n1"}, age or 0)]
    return info + (ages if age is not None else [])


@pytest.mark.parametrize(
    ("reason", "age", "alert"),
    [
        ("ExporterSilent", 900, "EverstepExporterSilent"),
        ("ExporterSilent", None, "EverstepExporterUnreadable"),
        ("ExporterContested", 900, "EverstepExporterUnreadable"),
        ("ExporterContested", None, "EverstepExporterUnreadable"),
        ("ExporterFrozen", 10, "EverstepExporterUnreadable"),
        ("GpuFatalXid", 900, "EverstepExporterSilent"),
        ("", 10, None),
    ],
)
def test_what_is_wrong_with_an_exporter_is_one_alert(
    reason: str, age: float | None, alert: str | None
) -> None:
    """And not one that tells to look at a pod which nobody asks, because there are two."""
    assert find_firing(*exporter(reason, age)) == ([alert] if alert else [])


def job(state: str, *, healthy: int = 1, epoch: int | None = 3) -> list[Sample]:
    labels = {"namespace": "team", "job": "lm"}
    found: list[Sample] = [
        ("everstep_job_state", {**labels, "state": state}, 1),
        ("everstep_job_checkpoint_healthy", labels, healthy),
    ]
    return found + ([("everstep_job_epoch", labels, epoch)] if epoch is not None else [])


@pytest.mark.parametrize("state", ["Running", "Recovering", "Starting", "Invalid"])
def test_checkpoints_that_do_not_commit_are_an_alert_while_the_job_may_train(state: str) -> None:
    assert "EverstepCheckpointUnhealthy" in find_firing(*job(state, healthy=0))
    assert "EverstepCheckpointUnhealthy" not in find_firing(*job(state))


@pytest.mark.parametrize(
    ("state", "alerts"), [("Failed", ["EverstepJobFailed"]), ("Suspended", []), ("Complete", [])]
)
def test_a_job_that_is_at_rest_has_no_alert_for_its_checkpoints(
    state: str, alerts: list[str]
) -> None:
    assert find_firing(*job(state, healthy=0)) == alerts


def test_a_job_that_trained_and_does_not_any_more_is_one_alert_whatever_its_state() -> None:
    """It gives its pods back every few minutes: an alert with the state in its labels would begin
    anew each time. A job that never trained is its author's affair.
    """
    (rule,) = (rule for rule in read_rules() if rule["alert"] == "EverstepJobNotRecovering")
    expression = promql_parser.parse(rule["expr"])
    states = ("Recovering", "Pending", "Starting", "Invalid")
    raised = [evaluate(expression, job(state)) for state in states]
    assert [labels for found in raised for labels, _ in found] == [
        {"namespace": "team", "job": "lm"}
    ] * 4
    for state in states:
        assert evaluate(expression, job(state, epoch=None)) == []
    for state in ("Running", "Suspending"):
        assert evaluate(expression, job(state)) == []


@pytest.mark.parametrize(("watched", "fires"), [(3, True), (4, False)])
def test_gpu_nodes_without_an_exporter_are_an_alert(watched: int, fires: bool) -> None:
    samples: list[Sample] = [
        ("everstep_gpu_nodes", {}, 4),
        ("everstep_gpu_nodes_watched", {}, watched),
        ("everstep_operator_leader", {}, 1),
    ]
    assert find_firing(*samples) == (["EverstepGpuNodesUnwatched"] if fires else [])


@pytest.mark.parametrize(("observes", "alerts"), [(1, ["EverstepNodeFaulty"]), (0, [])])
def test_a_faulty_node_that_nobody_cordons_is_an_alert(observes: int, alerts: list[str]) -> None:
    """Observe-only mode writes no NodeQuarantine, whose alert an armed operator raises."""
    labels = {"node": "n1", "state": "leaving", "reason": "GpuFatalXid"}
    samples: list[Sample] = [
        ("everstep_node_verdict_info", labels, 1),
        ("everstep_operator_observe_only", {}, observes),
    ]
    assert find_firing(*samples) == alerts
