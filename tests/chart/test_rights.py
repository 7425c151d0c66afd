"""The chart grants exactly these rights. A new right must be added here, too."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart_given import read_documents
from everstep_lab import chart
from everstep_lab.api import Object
from everstep_lab.seam import LabError

Right = tuple[str, str]
JOBS = {
    ("everstep.dev", "resilienttrainingjobs"): {"list", "watch", "delete"},
    ("everstep.dev", "resilienttrainingjobs/status"): {"patch"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "secrets"): {"create"},
    ("", "events"): {"create"},
}
HEALTH = {
    ("everstep.dev", "nodequarantines"): {"list", "watch"},
    ("", "nodes"): {"list", "watch"},
}
OPERATOR = {**JOBS, **HEALTH}
LEASES = {
    ("coordination.k8s.io", "leases"): {"create"},
    ("coordination.k8s.io", "leases/everstep-operator"): {"get", "update"},
}
OPERATOR_AT_HOME = {
    **LEASES,
    ("", "serviceaccounts/token/everstep-nodes"): {"create"},
}
NODE_LEASES = {("coordination.k8s.io", "leases"): {"list"}}
NODES = {
    ("", "nodes"): {"patch"},
    ("everstep.dev", "nodequarantines"): {"create", "patch"},
    ("everstep.dev", "nodequarantines/status"): {"patch"},
    ("apiextensions.k8s.io", "customresourcedefinitions/nodequarantines.everstep.dev"): {"get"},
}
RELEASE = {
    ("", "nodes"): {"list", "patch"},
    ("everstep.dev", "nodequarantines"): {"list", "delete"},
}
RELEASE_AT_HOME = {("coordination.k8s.io", "leases/everstep-operator"): {"get", "update"}}
TEST_AT_HOME = {("coordination.k8s.io", "leases/everstep-operator"): {"get"}}


def rights_of(documents: list[Object], account: str) -> dict[str, dict[Right, set[str]]]:
    """Return the account's rights by the kind of the binding: for the whole cluster, or within a
    namespace.
    """
    found: dict[str, dict[Right, set[str]]] = {"ClusterRoleBinding": {}, "RoleBinding": {}}
    for (kind, _), rights in rights_by_place(documents, account).items():
        for key, verbs in rights.items():
            found[kind].setdefault(key, set()).update(verbs)
    return found


def rights_by_place(
    documents: list[Object], account: str
) -> dict[tuple[str, str], dict[Right, set[str]]]:
    """Return the account's rights by the binding's kind and namespace (empty: the whole cluster)."""
    found: dict[tuple[str, str], dict[Right, set[str]]] = {}
    for binding in documents:
        if account not in [each["name"] for each in binding.get("subjects", ())]:
            continue
        place = binding["kind"], binding["metadata"].get("namespace", "")
        for key, verbs in _rights(_rules(documents, binding)):
            found.setdefault(place, {}).setdefault(key, set()).update(verbs)
    return found


def _rights(rules: list[Object]) -> Iterator[tuple[Right, set[str]]]:
    for rule in rules:
        names = rule.get("resourceNames", [""])
        for group, resource, name in itertools.product(rule["apiGroups"], rule["resources"], names):
            yield (group, f"{resource}/{name}" if name else resource), set(rule["verbs"])


def _rules(documents: list[Object], binding: Object) -> list[Object]:
    """Return the rules of the bound role. A Role is looked up in the binding's own namespace."""
    role, namespace = binding["roleRef"], binding["metadata"].get("namespace")
    for document in documents:
        metadata = document["metadata"]
        same = role["kind"] == "ClusterRole" or metadata.get("namespace") == namespace
        if document["kind"] == role["kind"] and metadata["name"] == role["name"] and same:
            rules: list[Object] = document["rules"]
            return rules
    raise AssertionError(f"{role} is bound and not there")


def test_the_operator_has_the_rights_it_uses_and_no_others(defaults: list[Object]) -> None:
    assert rights_by_place(defaults, "everstep-operator") == {
        ("ClusterRoleBinding", ""): OPERATOR,
        ("RoleBinding", "kube-node-lease"): NODE_LEASES,
        ("RoleBinding", chart.NAMESPACE): OPERATOR_AT_HOME,
    }


def test_in_namespaces_of_its_own_it_has_roles_there_and_sees_the_clusters_nodes(
    helm: Path,
) -> None:
    documents = read_documents(
        chart.render(helm, values=["watchNamespaces={a,b}", "exporter.namespaces={gpu-operator}"])
    )
    assert rights_by_place(documents, "everstep-operator") == {
        ("ClusterRoleBinding", ""): HEALTH,
        ("RoleBinding", "a"): JOBS,
        ("RoleBinding", "b"): JOBS,
        ("RoleBinding", "gpu-operator"): {("", "pods"): {"list"}},
        ("RoleBinding", "default"): {("", "events"): {"create"}},
        ("RoleBinding", "kube-node-lease"): NODE_LEASES,
        ("RoleBinding", chart.NAMESPACE): OPERATOR_AT_HOME,
    }
    assert rights_of(documents, "everstep-nodes")["ClusterRoleBinding"] == NODES


def test_without_health_it_has_no_right_on_nodes(helm: Path) -> None:
    everywhere = read_documents(chart.render(helm, values=["health.enabled=false"]))
    assert rights_of(everywhere, "everstep-operator") == {
        "ClusterRoleBinding": JOBS, "RoleBinding": LEASES,
    }  # fmt: skip
    confined = read_documents(
        chart.render(helm, values=["health.enabled=false", "watchNamespaces={a}"])
    )
    assert rights_by_place(confined, "everstep-operator") == {
        ("RoleBinding", "a"): JOBS, ("RoleBinding", chart.NAMESPACE): LEASES,
    }  # fmt: skip
    for documents in (everywhere, confined):
        assert rights_by_place(documents, "everstep-nodes") == {}
        assert rights_by_place(documents, "everstep-release") == {}


def test_who_is_confined_must_say_where_the_exporters_run(helm: Path) -> None:
    with pytest.raises(LabError, match=r"exporter\.namespaces is not"):
        chart.render(helm, values=["watchNamespaces={a}"])


def test_rights_on_nodes_belong_to_another_account(defaults: list[Object]) -> None:
    found = rights_of(defaults, "everstep-nodes")
    assert found == {"ClusterRoleBinding": NODES, "RoleBinding": {}}


def test_what_uninstall_may_do_exists_only_while_it_runs(defaults: list[Object]) -> None:
    found = rights_of(defaults, "everstep-release")
    assert found == {"ClusterRoleBinding": RELEASE, "RoleBinding": RELEASE_AT_HOME}
    for document in defaults:
        if document["metadata"]["name"] == "everstep-release":
            assert document["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"


def test_helms_test_may_look_at_one_lease(defaults: list[Object]) -> None:
    found = rights_of(defaults, "everstep-test")
    assert found == {"ClusterRoleBinding": {}, "RoleBinding": TEST_AT_HOME}


def test_who_may_release_nodes_may_read_what_the_commands_about_nodes_read(
    defaults: list[Object],
) -> None:
    role, *more = [d for d in defaults if d["metadata"]["name"] == "everstep-admin"]
    assert not more
    assert dict(_rights(role["rules"])) == {
        ("everstep.dev", "nodequarantines"): {"get", "list", "watch", "patch", "delete"},
        ("", "nodes"): {"get", "list", "watch"},
        ("", "events"): {"get", "list", "watch"},
    }


def test_the_readme_tells_of_these_rights_and_no_others(defaults: list[Object]) -> None:
    told: dict[tuple[str, str], dict[str, set[str]]] = {}
    for line in (chart.FOLDER / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("everstep-"):
            account, where, resource, verbs, why = cells
            assert why
            told.setdefault((account, where), {})[resource] = set(verbs.split(", "))
    places = {"": "cluster", chart.NAMESPACE: "namespace"}
    found = {
        (account, places.get(namespace, namespace)): {
            f"{g}/{r}" if g else r: verbs for (g, r), verbs in rights.items()
        }
        for account in {account for account, _ in told}
        for (_, namespace), rights in rights_by_place(defaults, account).items()
    }
    assert told == found


def test_no_rule_has_a_wildcard_and_no_secret_can_be_read(helm: Path) -> None:
    for document in read_documents(chart.render(helm)):
        for rule in document.get("rules", ()):
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert "*" not in words, document["metadata"]["name"]
            assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]
