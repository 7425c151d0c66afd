"""The operator, the API server, Prometheus and Grafana must accept what the chart renders."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from chart_given import CASES, apply, arguments_of, find, read_documents
from everstep_lab import Lab, chart
from everstep_lab.api import Object
from everstep_operator import crd
from everstep_operator.health.metrics import HealthMetrics
from everstep_operator.kube import Kube
from everstep_operator.metrics import Metrics
from everstep_operator.pacing import Bucket
from everstep_operator.settings import load_settings
from everstep_operator.world import World

MONITORING = Path(__file__).parent / "monitoring" / "crds.yaml"
CLUSTERED = [None, *CASES]


def name_of(case: Path | None) -> str:
    return case.stem if case else "defaults"


def render(helm: Path, case: Path | None) -> list[Object]:
    return read_documents(chart.render(helm, files=[case] if case else []))


@pytest.mark.parametrize("case", CLUSTERED, ids=name_of)
def test_the_operator_understands_its_arguments(
    helm: Path, case: Path | None, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    arguments = arguments_of(find(render(helm, case), "Deployment", "everstep-operator"))
    assert "--key-file=/etc/everstep/key/key" in arguments
    arguments = [a for a in arguments if not a.startswith("--key-file")] + [f"--key-file={key}"]
    command, settings = load_settings(arguments, {})
    assert command == "run"
    assert settings.lease_place == (chart.NAMESPACE, "everstep-operator")
    judges = name_of(case) != "jobs-only-values"
    assert settings.health is judges
    assert settings.nodes_account == ((chart.NAMESPACE, "everstep-nodes") if judges else None)
    confined = name_of(case) in ("confined-values", "jobs-only-values")
    assert settings.scope.namespaces == (("default",) if confined else ())
    assert settings.observe_only is (name_of(case) != "armed-values")


def test_the_hook_calls_a_command_that_there_is(defaults: list[Object]) -> None:
    (container,) = find(defaults, "Job", "everstep-release")["spec"]["template"]["spec"][
        "containers"
    ]
    command, settings = load_settings([*container["command"][1:], *container["args"]], {})
    assert command == "release-all"
    assert settings.lease_place == (chart.NAMESPACE, "everstep-operator")


@pytest.mark.parametrize("keep", [True, False])
def test_the_charts_crds_are_those_of_the_models(helm: Path, keep: bool) -> None:
    shown = chart.render(helm, only=["crds.yaml"], values=[f"crds.keep={str(keep).lower()}"])
    found = {d["metadata"]["name"]: d for d in read_documents(shown)}
    for resource in crd.resources():
        wanted = crd.build_crd(resource)
        got = found.pop(wanted["metadata"]["name"])
        assert got["spec"] == wanted["spec"]
        policy = (got["metadata"].get("annotations") or {}).get("helm.sh/resource-policy")
        assert policy == ("keep" if keep else None)
    assert found == {}


@pytest.fixture(scope="module")
def ready_lab(installed: Lab, defaults: list[Object]) -> Lab:
    """The lab with the Prometheus Operator's CRDs and a namespace that enforces `restricted`."""
    lab = installed
    lab.kubectl("apply", "-f", str(MONITORING))
    lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    label = "pod-security.kubernetes.io/enforce=restricted"
    lab.kubectl("label", "--overwrite", "namespace", chart.NAMESPACE, label)
    # A dry run of a pod needs the real ServiceAccount.
    for account in ("everstep-release", "everstep-test"):
        apply(lab, json.dumps(find(defaults, "ServiceAccount", account)))
    return lab


@pytest.mark.lab
@pytest.mark.parametrize("case", CLUSTERED, ids=name_of)
def test_an_api_server_accepts_everything(helm: Path, ready_lab: Lab, case: Path | None) -> None:
    text = chart.render(helm, files=[case] if case else [])
    dry = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
    out = ready_lab.kubectl("apply", *dry, stdin=text, check=False, timeout=120)
    unexpected = [line for line in out.splitlines() if not line.endswith("(server dry run)")]
    assert unexpected == []
    assert len(out.splitlines()) == len(read_documents(text))


@pytest.mark.lab
@pytest.mark.parametrize("case", CLUSTERED, ids=name_of)
def test_each_pod_runs_where_restricted_is_enforced(
    helm: Path, ready_lab: Lab, case: Path | None
) -> None:
    """The API server checks pods against `restricted`, not the Deployment or Job that creates them."""
    pods = []
    for document in render(helm, case):
        if "template" in document.get("spec", {}):
            spec = copy.deepcopy(document["spec"]["template"]["spec"])
            spec.pop("priorityClassName", None)  # The class does not exist in a dry run.
            metadata = {"name": f"trial-{len(pods)}", "namespace": chart.NAMESPACE}
            pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    text = "\n---\n".join(map(json.dumps, pods))
    out = ready_lab.kubectl(
        "create", "--dry-run=server", "-f", "-", stdin=text, check=False, timeout=120
    )
    assert len(pods) == (1 if name_of(case) == "jobs-only-values" else 2), (
        "a pod of the operator, and one of release-all"
    )
    assert out.splitlines() == [f"pod/trial-{n} created (server dry run)" for n in range(len(pods))]


def pods_of(documents: list[Object]) -> dict[str, Object]:
    """Name → metadata and spec of each pod that the chart makes, hooks included."""
    templates = [d["spec"]["template"] for d in documents if "template" in d.get("spec", {})]
    pods = [*templates, *(d for d in documents if d["kind"] == "Pod")]
    return {pod["metadata"]["labels"]["app.kubernetes.io/name"]: pod for pod in pods}


def selects(selector: Object, labels: Object) -> bool:
    terms = selector.get("matchExpressions", [])
    assert all(term["operator"] == "In" for term in terms)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(term["key"]) in term["values"] for term in terms
    )


def test_each_pod_may_reach_the_api_server_where_nothing_is_allowed_by_default(
    defaults: list[Object],
) -> None:
    """Else `helm uninstall` fails in such a namespace, and nodes stay cordoned."""
    policies = [d["spec"] for d in defaults if d["kind"] == "NetworkPolicy"]
    for name, pod in pods_of(defaults).items():
        mine = [p for p in policies if selects(p["podSelector"], pod["metadata"]["labels"])]
        open_ports = {port["port"] for p in mine for rule in p["egress"] for port in rule["ports"]}
        assert {443, 6443, 53, 5353} <= open_ports, name
        assert (name != "everstep-test") or 8080 in open_ports


def test_each_pod_has_the_resources_that_a_quota_may_ask_for(helm: Path) -> None:
    pods = pods_of(read_documents(chart.render(helm, values=["resources.limits.cpu=2"])))
    assert {"everstep-operator", "everstep-release", "everstep-test"} == pods.keys()
    for name, pod in pods.items():
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == 2, name


def test_uninstalls_hook_has_the_flags_of_the_operator_that_it_outlasts(helm: Path) -> None:
    more = ["--lease-seconds=60", "--renew-seconds=40"]
    shown = chart.render(helm, values=[f"extraArgs={{{','.join(more)}}}"])
    (container,) = pods_of(read_documents(shown))["everstep-release"]["spec"]["containers"]
    command, settings = load_settings([*container["command"][1:], *container["args"]], {})
    assert (command, settings.renew_seconds) == ("release-all", 40.0)


def test_a_version_with_build_metadata_makes_valid_labels(
    helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `helm package --version` sets it."""
    folder = tmp_path / "everstep"
    shutil.copytree(chart.FOLDER, folder)
    definition = folder / "Chart.yaml"
    definition.write_text(definition.read_text().replace("ersion: 0.1.0", "ersion: 0.1.0+g123abc"))
    monkeypatch.setattr(chart, "FOLDER", folder)
    for document in read_documents(chart.render(helm)):
        labels = document["metadata"].get("labels") or {}
        for value in labels.values():
            assert re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", str(value)), value


def test_a_namespace_whose_name_is_a_number_stays_text(helm: Path, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text('{watchNamespaces: ["42"], exporter: {namespaces: ["43"]}}')
    documents = read_documents(chart.render(helm, files=[values]))
    namespaces = [d["metadata"]["namespace"] for d in documents if "namespace" in d["metadata"]]
    assert {"42", "43"} <= set(namespaces)


def test_a_release_and_its_namespace_may_be_numbers(
    helm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chart, "RELEASE", "123")
    monkeypatch.setattr(chart, "NAMESPACE", "42")
    monitors = ["serviceMonitor", "prometheusRule", "dashboard"]
    values = [f"{name}.enabled=true" for name in monitors]
    documents = read_documents(chart.render(helm, values=values))
    for document in documents:
        metadata = document["metadata"]
        assert metadata.get("namespace", "42") in ("42", "kube-node-lease"), metadata
        found = re.findall(r"'(?:namespace|app.kubernetes.io/instance)': (\w+)", str(document))
        assert found == [], document["kind"]


@pytest.mark.parametrize(
    ("tag", "shown"),
    [("0.2.0", ":0.2.0"), ("sha256:0a1b", "@sha256:0a1b"), ("0.2.0@sha256:0a", ":0.2.0@sha256:0a")],
)
def test_the_image_may_be_named_by_its_digest(helm: Path, tag: str, shown: str) -> None:
    documents = read_documents(
        chart.render(helm, values=[f"image.tag={tag}", "image.repository=r.example:5000/op"])
    )
    for name, pod in pods_of(documents).items():
        assert pod["spec"]["containers"][0]["image"] == f"r.example:5000/op{shown}", name


def test_the_files_that_a_lab_installs_are_what_helm_renders(helm: Path) -> None:
    outdated = chart.list_outdated(chart.render_files(helm))
    assert outdated == [], "run `python -m everstep_lab.chart`"


def test_a_lab_installs_all_rights_and_policies_of_the_chart(defaults: list[Object]) -> None:
    def named(documents: list[Object]) -> set[tuple[str, str]]:
        return {(d["kind"], d["metadata"]["name"]) for d in documents}

    kinds = ("ClusterRole", "Role", "ValidatingAdmission", "ServiceAccount", "CustomResource")
    hooks = [d for d in defaults if "helm.sh/hook" in (d["metadata"].get("annotations") or {})]
    wanted = {n for n in named(defaults) - named(hooks) if n[0].startswith(kinds)}
    for observe_only in (False, True):
        found = read_documents(chart.read_installed(observe_only=observe_only))
        assert named(found) == wanted | {("Namespace", chart.NAMESPACE)}


def selectors(expression: str) -> set[str]:
    """Return the names of the metrics in a PromQL expression; raises an exception if it does not parse."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        if isinstance(node, promql_parser.MatrixSelector):
            visit(node.vector_selector)
        for part in ("expr", "lhs", "rhs", "param"):
            child = getattr(node, part, None)
            if child is not None and isinstance(child, promql_parser.Expr):
                visit(child)
        for child in getattr(node, "args", ()) or ():
            visit(child)

    visit(promql_parser.parse(expression))
    return found


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """The metric names that the operator's metrics page can show."""
    port = Kube(None, Bucket(1, 1))  # type: ignore[arg-type]
    operator = Metrics([port], World(), lambda: True, observe_only=False)
    page = operator.render().decode() + HealthMetrics().render()
    found = set()
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            ends = ("", "_bucket", "_count", "_sum") if kind == "histogram" else ("",)
            found |= {f"{name}{end}" for end in ends}
    return found


def test_alerts_parse_and_speak_of_metrics_that_the_operator_has(
    helm: Path, exposed: set[str]
) -> None:
    shown = chart.render(helm, values=["prometheusRule.enabled=true"])
    rule = find(read_documents(shown), "PrometheusRule", "everstep")
    rules = [rule for group in rule["spec"]["groups"] for rule in group["rules"]]
    assert len(rules) >= 10
    for each in rules:
        assert selectors(each["expr"]) <= exposed, each["alert"]
        assert {"summary", "description"} == set(each["annotations"])


def test_the_dashboard_asks_for_metrics_that_the_operator_has(
    helm: Path, exposed: set[str]
) -> None:
    shown = chart.render(helm, values=["dashboard.enabled=true"])
    document = find(read_documents(shown), "ConfigMap", "everstep-dashboard")
    dashboard = json.loads(document["data"]["everstep.json"])
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(asked) >= 15
    for expression in asked:
        assert selectors(expression) <= exposed, expression
        of_jobs = expression.startswith("everstep_job") or "(everstep_job" in expression
        assert not of_jobs or 'namespace=~"$namespace",job=~"$job"' in expression, expression


def test_a_parser_that_finds_no_metric_would_prove_nothing() -> None:
    assert selectors('sum by (a) (rate(x_total{b="c"}[5m])) > 2 and on (d) y == 1') == {
        "x_total",
        "y",
    }
    assert selectors("absent(z == 1)") == {"z"}
    with pytest.raises(ValueError, match="unclosed"):
        selectors("sum by (")


def test_the_files_of_the_charts_folder_are_yaml() -> None:
    for path in (chart.FOLDER / "files").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())


def test_monitors_and_rules_have_the_labels_by_which_a_prometheus_selects_them(helm: Path) -> None:
    """kube-prometheus-stack ignores, without a word, what lacks its release's label."""
    for monitor in ("serviceMonitor", "podMonitor"):
        values = [
            f"{monitor}.enabled=true",
            "prometheusRule.enabled=true",
            "dashboard.enabled=true",
        ]
        documents = read_documents(
            chart.render(helm, values=[*values, "monitoringLabels.release=monitoring"])
        )
        found = {d["kind"]: d["metadata"]["labels"] for d in documents}
        for kind in (monitor[0].upper() + monitor[1:], "PrometheusRule"):
            assert found[kind]["release"] == "monitoring"
            assert found[kind]["app.kubernetes.io/part-of"] == "everstep"
        assert "release" not in found["ConfigMap"]
        assert "release" not in found["Deployment"]
