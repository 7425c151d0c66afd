"""The chart refuses a wrong value by its name. Each value has a description and is in the README."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_lab import chart
from everstep_lab.seam import LabError

OF_A_DEPENDENCY = ("enabled", "global")
"""Values that Helm passes to a chart that is another's dependency."""
WRONG = [
    ("replicas=0", "replicas"),
    ("replicas=two", "replicas"),
    ("observeOnly=maybe", "observeOnly"),
    ("cordonBudget=10", "cordonBudget"),
    ("cordonBudget=lots", "cordonBudget"),
    ("exporter.port=99999", "port"),
    ("exporter.selector=a", "selector"),
    ("exporter.selectors={}", "selectors"),
    ("exporter.selectors={a;b}", "selectors"),
    ("exporter.namespaces={GPU}", "namespaces"),
    ("scrapeSeconds=0", "scrapeSeconds"),
    ("scrapeSeconds=600", "scrapeSeconds"),
    ("logLevel=LOUD", "logLevel"),
    ("image.pullPolicy=Sometimes", "pullPolicy"),
    ("extraArgs={verbose}", "extraArgs"),
    ("key.existingsecret=k", "existingsecret"),
    ("observonly=false", "observonly"),
    ("networkPolicy.apiServerPorts={}", "apiServerPorts"),
    ("crds.keep=no-way", "keep"),
    ("observeOnly=null", "observeOnly"),
    ("crds.keep=null", "keep"),
    ("exporter=null", "exporter"),
    ("image.repository=registry:5000/operator:0.1.0", "repository"),
    ("image.repository=operator@sha256:0a1b", "repository"),
    (
        "serviceMonitor.enabled=true,podMonitor.enabled=true",
        "serviceMonitor.enabled and podMonitor.enabled",
    ),
]


@pytest.mark.parametrize(("value", "named"), WRONG, ids=[value for value, _ in WRONG])
def test_a_wrong_value_is_refused_and_named(helm: Path, value: str, named: str) -> None:
    with pytest.raises(LabError) as refused:
        chart.render(helm, values=[value])
    assert named in str(refused.value)


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in schema["properties"].items():
        here = f"{path}.{name}" if path else name
        yield here, each
        if "properties" in each:
            yield from leaves(each, here)


def test_every_value_is_described_and_has_the_default_that_values_yaml_has() -> None:
    schema = json.loads((chart.FOLDER / "values.schema.json").read_text())
    values = yaml.safe_load((chart.FOLDER / "values.yaml").read_text())
    for path, each in leaves(schema):
        assert each.get("description", "").endswith("."), path
        if "properties" in each or path in OF_A_DEPENDENCY:
            continue
        found = values
        for part in path.split("."):
            found = found[part]
        assert found == each["default"], path


def test_null_is_refused_where_it_would_mean_something_else_than_the_default() -> None:
    """Helm removes a value that is null. Without `observeOnly` the policy was that of an armed operator, without
    `crds.keep` an uninstall deleted all jobs. Without `resources` pods have none, which may be wanted.
    """
    schema = json.loads((chart.FOLDER / "values.schema.json").read_text())
    for parent in (schema, *(each for _, each in leaves(schema) if "properties" in each)):
        for name, each in parent["properties"].items():
            if name in (*OF_A_DEPENDENCY, "resources"):
                continue
            needed = "properties" in each or each["default"] not in ("", [], {})
            assert (name in parent.get("required", ())) is needed, name


def test_null_is_as_good_as_an_empty_list(helm: Path) -> None:
    empty = ("imagePullSecrets", "watchNamespaces", "extraArgs", "nodeSelector", "tolerations")
    more = ("exporter.namespaces", "networkPolicy.exporterPorts", "monitoringLabels", "image.tag")
    only = ["deployment.yaml", "networkpolicy.yaml"]
    values = [f"{name}=null" for name in (*empty, *more, "key.existingSecret")]
    assert chart.render(helm, only=only, values=values) == chart.render(helm, only=only)


def test_the_readmes_table_is_that_of_the_schema() -> None:
    script = chart.FOLDER.parent / "values_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0


def test_no_value_is_there_that_the_schema_does_not_know() -> None:
    schema = json.loads((chart.FOLDER / "values.schema.json").read_text())
    for _, each in leaves(schema):
        if "properties" in each:
            assert each["additionalProperties"] is False
    assert schema["additionalProperties"] is False


NOTES = """
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data:
  text: |
{{ include (print $.Template.BasePath "/NOTES.txt") . | indent 4 }}
"""


@pytest.mark.parametrize("judges", [True, False])
def test_the_notes_speak_of_exporters_only_if_nodes_are_judged(
    helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judges: bool
) -> None:
    """Helm shows them only on a cluster, so another template includes them."""
    folder = tmp_path / "everstep"
    shutil.copytree(chart.FOLDER, folder)
    (folder / "templates" / "notes.yaml").write_text(NOTES)
    monkeypatch.setattr(chart, "FOLDER", folder)
    values = [f"health.enabled={str(judges).lower()}", "exporter.selectors={app in (a\\, b)}"]
    notes = yaml.safe_load(chart.render(helm, only=["notes.yaml"], values=values))["data"]["text"]
    assert ("kubectl get pods -A -l 'app in (a, b)'" in notes) is judges
    assert ("Check your exporters" in notes) is judges
    assert "helm test everstep" in notes


def test_it_may_be_a_dependency_with_a_condition(helm: Path, tmp_path: Path) -> None:
    """As in a platform team's chart of charts."""
    shutil.copytree(chart.FOLDER, tmp_path / "charts" / "everstep")
    dependency = {"name": "everstep", "version": "0.1.0", "condition": "everstep.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    (tmp_path / "Chart.yaml").write_text(json.dumps({**parent, "dependencies": [dependency]}))
    values = {"everstep": {"enabled": True, "replicas": 3}, "global": {"region": "eu"}}
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    command = [str(helm), "template", "p", str(tmp_path), f"--kube-version={chart.KUBERNETES}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    documents = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert [d["spec"]["replicas"] for d in documents if d["kind"] == "Deployment"] == [3]
