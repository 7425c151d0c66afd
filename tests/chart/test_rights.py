"""The rights that are shipped: exactly these. Whoever needs more writes it here, too."""

from pathlib import Path

from chart_given import read_documents
from everstep_lab import chart
from everstep_lab.api import Object

Right = tuple[str, str]
OPERATOR = {
    ("everstep.dev", "resilienttrainingjobs"): {"list", "watch", "delete"},
    ("everstep.dev", "resilienttrainingjobs/status"): {"patch"},
    ("everstep.dev", "nodequarantines"): {"list", "watch"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "nodes"): {"list", "watch"},
    ("", "secrets"): {"create"},
    ("", "events"): {"create"},
}
OPERATOR_AT_HOME = {
    ("coordination.k8s.io", "leases"): {"create"},
    ("coordination.k8s.io", "leases/everstep-operator"): {"get", "update"},
    ("", "serviceaccounts/token/everstep-nodes"): {"create"},
}
NODES = {
    ("", "nodes"): {"patch"},
    ("everstep.dev", "nodequarantines"): {"create", "patch"},
    ("everstep.dev", "nodequarantines/status"): {"patch"},
}
RELEASE = {
    ("", "nodes"): {"list", "patch"},
    ("everstep.dev", "nodequarantines"): {"list", "delete"},
}
RELEASE_AT_HOME = {("coordination.k8s.io", "leases/everstep-operator"): {"get", "update"}}
TEST_AT_HOME = {("coordination.k8s.io", "leases/everstep-operator"): {"get"}}


def rights_of(documents: list[Object], account: str) -> dict[str, dict[Right, set[str]]]:
    """By the kind of the binding: for the whole cluster, or within the namespace."""
    found: dict[str, dict[Right, set[str]]] = {"ClusterRoleBinding": {}, "RoleBinding": {}}
    for binding in documents:
        if account not in [each["name"] for each in binding.get("subjects", ())]:
            continue
        for rule in _rules(documents, binding["roleRef"]):
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", [""]):
                        key = (group, f"{resource}/{name}" if name else resource)
                        found[binding["kind"]].setdefault(key, set()).update(rule["verbs"])
    return found


def _rules(documents: list[Object], role: Object) -> list[Object]:
    for document in documents:
        if document["kind"] == role["kind"] and document["metadata"]["name"] == role["name"]:
            rules: list[Object] = document["rules"]
            return rules
    raise AssertionError(f"{role} is bound and not there")


def test_the_operator_has_the_rights_it_uses_and_no_others(defaults: list[Object]) -> None:
    found = rights_of(defaults, "everstep-operator")
    assert found == {"ClusterRoleBinding": OPERATOR, "RoleBinding": OPERATOR_AT_HOME}


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


def test_the_readme_tells_of_these_rights_and_no_others(defaults: list[Object]) -> None:
    told: dict[tuple[str, str], dict[str, set[str]]] = {}
    for line in (chart.FOLDER / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("everstep-"):
            account, where, resource, verbs, why = cells
            assert why
            told.setdefault((account, where), {})[resource] = set(verbs.split(", "))
    places = {"ClusterRoleBinding": "cluster", "RoleBinding": "namespace"}
    found = {
        (account, places[kind]): {f"{g}/{r}" if g else r: verbs for (g, r), verbs in rights.items()}
        for account in {account for account, _ in told}
        for kind, rights in rights_of(defaults, account).items()
        if rights
    }
    assert told == found


def test_no_rule_has_a_wildcard_and_no_secret_can_be_read(helm: Path) -> None:
    for document in read_documents(chart.render(helm)):
        for rule in document.get("rules", ()):
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert "*" not in words, document["metadata"]["name"]
            assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]
