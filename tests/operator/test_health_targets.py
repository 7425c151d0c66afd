"""Which exporters are accepted, and for which node."""

from typing import Any

import pytest

from everstep_operator.health.outcomes import FailureKind, ScrapeFailure
from everstep_operator.health.targets import Targets, build_failures, choose_targets
from everstep_operator.settings import SettingsError, load_settings
from fake_exporter import an_exporter

KEY = {"EVERSTEP_OPERATOR_KEY": "k" * 32}
Object = dict[str, Any]


def choose(*pods: Object) -> Targets:
    return choose_targets(pods, namespaces=("gpu-operator", "kube-system"), port=9400)


def url_of(*pods: Object) -> str:
    (target,) = choose(*pods).by_node.values()
    return target.url


def test_the_port_is_the_one_called_metrics_or_the_only_one_or_the_default() -> None:
    other = [{"name": "x", "containerPort": 1}, {"name": "metrics", "containerPort": 9401}]
    assert url_of(an_exporter()) == "http://10.0.0.7:9400/metrics"
    assert url_of(an_exporter(ports=other)) == "http://10.0.0.7:9401/metrics"
    assert url_of(an_exporter(ports=[{"containerPort": 9410}])) == "http://10.0.0.7:9410/metrics"
    assert url_of(an_exporter(ports=[])) == "http://10.0.0.7:9400/metrics"
    assert url_of(an_exporter(ports=None)) == "http://10.0.0.7:9400/metrics"
    assert url_of(an_exporter(address="fd00::7")) == "http://[fd00::7]:9400/metrics"


def test_pods_without_node_or_address_and_finished_ones_are_no_targets() -> None:
    found = choose(an_exporter(node=""), an_exporter(address=""), an_exporter(phase="Failed"))
    assert found == Targets(by_node={}, contested={}, strangers=())


STRANGERS: dict[str, tuple[Object, str]] = {
    "in another namespace": ({"namespace": "tenant"}, "exporters' namespaces"),
    "made by hand": ({"owner": {"controller": False}}, "no DaemonSet"),
    "of a Deployment": ({"owner": {"kind": "ReplicaSet"}}, "no DaemonSet"),
    "of another group's kind": ({"owner": {"apiVersion": "evil.dev/v1"}}, "no DaemonSet"),
}


@pytest.mark.parametrize("how", STRANGERS)
def test_a_strangers_exporter_is_not_believed_and_contests_nothing(how: str) -> None:
    changes, why = STRANGERS[how]
    stranger = an_exporter("stranger", address="10.6.6.6", **changes)
    found = choose(an_exporter(), stranger)
    assert [t.url for t in found.by_node.values()] == ["http://10.0.0.7:9400/metrics"]
    assert found.contested == {}
    (told,) = found.strangers
    assert "stranger" in told
    assert why in told
    assert choose(stranger).by_node == {}


def test_an_exporter_speaks_for_the_node_that_its_pod_runs_on() -> None:
    found = choose(an_exporter("one", node="node-1"), an_exporter("two", node="node-2"))
    assert {node: target.node for node, target in found.by_node.items()} == {
        "node-1": "node-1", "node-2": "node-2",
    }  # fmt: skip


def test_of_two_exporters_on_a_node_neither_is_asked() -> None:
    found = choose(an_exporter(), an_exporter("other", namespace="kube-system"))
    assert found.by_node == {}
    assert found.contested == {"node-1": ("gpu-operator/exporter", "kube-system/other")}
    (scrape,) = build_failures(found, ["node-1"], 5.0)
    assert isinstance(scrape.outcome, ScrapeFailure)
    assert scrape.outcome.kind is FailureKind.CONTESTED
    assert "gpu-operator/exporter, kube-system/other" in scrape.outcome.message


def test_a_pod_that_both_selectors_find_is_one_exporter() -> None:
    assert url_of(an_exporter(), an_exporter()) == "http://10.0.0.7:9400/metrics"


def test_an_update_of_the_daemonset_contests_nothing() -> None:
    old = an_exporter("old", address="10.0.0.1")
    assert "10.0.0.1" in url_of(old, an_exporter("new", address="10.0.0.2", ready=False))
    leaving = an_exporter("old", address="10.0.0.1", deleting=True)
    assert "10.0.0.2" in url_of(leaving, an_exporter("new", address="10.0.0.2"))
    assert "10.0.0.2" in url_of(leaving, an_exporter("new", address="10.0.0.2", ready=False))
    assert "10.0.0.1" in url_of(leaving)


def test_a_known_node_without_an_exporter_is_silent() -> None:
    (scrape,) = build_failures(choose(an_exporter()), ["node-1", "node-2"], 5.0)
    assert (scrape.node, scrape.started) == ("node-2", 5.0)
    assert isinstance(scrape.outcome, ScrapeFailure)
    assert scrape.outcome.kind is FailureKind.ABSENT


def test_by_default_both_usual_exporters_are_found() -> None:
    _, settings = load_settings([], KEY)
    assert settings.exporter_selector_list == (
        "app.kubernetes.io/name=dcgm-exporter", "app=nvidia-dcgm-exporter",
    )  # fmt: skip
    assert "gpu-operator" in settings.exporter_namespace_list


@pytest.mark.parametrize("given", ["", "gpu-operator,", "GPU", "a b", "a;b"])
def test_namespaces_that_are_none_are_refused_with_the_flag(given: str) -> None:
    with pytest.raises(SettingsError, match="--exporter-namespaces"):
        load_settings([f"--exporter-namespaces={given}"], KEY)
