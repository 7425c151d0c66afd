"""The rights that are shipped: exactly these. Whoever needs more writes it here, too."""

from pathlib import Path

import yaml

RBAC = Path(__file__).parents[2] / "charts" / "everstep" / "rbac.yaml"
ALLOWED = {
    ("everstep.dev", "resilienttrainingjobs"): {"get", "list", "watch", "delete"},
    ("everstep.dev", "resilienttrainingjobs/status"): {"patch"},
    ("everstep.dev", "nodequarantines"): {"get", "list", "watch", "create", "patch"},
    ("everstep.dev", "nodequarantines/status"): {"patch"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "nodes"): {"get", "list", "watch", "patch"},
    ("", "secrets"): {"create"},
    ("", "events"): {"create"},
}


def test_the_operator_has_the_rights_it_uses_and_no_others() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for document in yaml.safe_load_all(RBAC.read_text()):
        for rule in document.get("rules") or ():
            assert "resourceNames" not in rule
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    found.setdefault((group, resource), set()).update(rule["verbs"])
    assert found == ALLOWED


def test_nothing_is_a_wildcard_and_no_secret_can_be_read() -> None:
    text = RBAC.read_text()
    assert '"*"' not in text
    assert "'*'" not in text
