"""The CRDs are checked in as generated and small enough, and both validators use the same rules."""

import copy
from typing import Any

import pytest

from everstep_contract.units import ONE_RANK, Mesh
from everstep_operator import crd, model
from job_builders import a_spec


def test_the_files_checked_in_are_what_the_models_say() -> None:
    assert [str(path) for path in crd.find_stale()] == [], "run `make crds`"


def test_they_fit_into_a_client_side_apply() -> None:
    for resource in crd.resources():
        assert len(crd.build_text(resource)) < crd.CLIENT_SIDE_APPLY_LIMIT / 2


def test_only_kinds_of_a_namespace_belong_to_all() -> None:
    """`kubectl delete all --all -n team` also deletes cluster-scoped objects of that category: nodes would be free."""
    named = {r.kind: crd.build_crd(r)["spec"]["names"]["categories"] for r in crd.resources()}
    assert named == {"ResilientTrainingJob": ["all"], "NodeQuarantine": []}


def fields(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, inner in (schema.get("properties") or {}).items():
        found += fields(inner, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        found += fields(schema["items"], f"{path}[]")
    return found


@pytest.mark.parametrize("part", ["spec_model", "status_model"])
def test_every_field_is_explained_and_bounded(part: str) -> None:
    for resource in crd.resources():
        for path, schema in fields(crd.build_schema(getattr(resource, part))):
            assert not {"$ref", "anyOf", "title"} & set(schema), path
            assert schema.get("description") or path.endswith("[]") or not path, (
                f"{path}: no description"
            )


def test_explain_shows_the_defaults_of_what_users_write() -> None:
    recovery = model.RESOURCE.spec_model.model_fields["recovery"].annotation
    assert recovery is not None
    told = crd.describe_defaults(crd.build_schema(recovery))["properties"]
    assert told["drainTimeoutSeconds"]["description"].endswith(" committed. Default: 120.")
    assert told["forceDelete"]["description"].endswith(" Default: false.")


def test_every_message_of_a_rule_names_a_way_out() -> None:
    for cls in crd._models():
        for rule in cls.rules:
            assert len(rule.message) > 30, rule.cel


BAD: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"minReplicas": 4}}, "minReplicas must be at most replicas"),
    ({"workers": {"maxReplicas": 2}}, "replicas must be at most maxReplicas"),
    ({"workers": {"replicas": 0}}, "workers.replicas"),
    ({"checkpoint": {"uri": "http://x/y"}}, "uri must begin with"),
    ({"checkpoint": {"uri": "file://relative"}}, "uri must begin with"),
    ({"checkpoint": {"everySeconds": 5}}, "everySteps and everySeconds"),
    ({"checkpoint": {"run": "../other"}}, "run may hold"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
    ({"parallelism": {"shard": 0}}, "parallelism.shard"),
    ({"parallelism": {"pipeline": 2}}, "pipeline: not yet"),
    ({"parallelism": {"context": 2}}, "context: not yet"),
    ({"parallelism": {"shard": 2}}, "workers.replicas × processesPerWorker must be a whole number"),
    (
        {"workers": {"replicas": 4, "minReplicas": 3}, "parallelism": {"shard": 2}},
        "workers.minReplicas × processesPerWorker must be a whole number",
    ),
    (
        {"workers": {"replicas": 4, "spares": 1}, "parallelism": {"shard": 2, "tensor": 2}},
        "workers.spares × processesPerWorker must be a whole number",
    ),
    (
        {"workers": {"processesPerWorker": 4}, "parallelism": {"shard": 3, "tensor": 2}},
        "one must be a multiple of the other",
    ),
    ({"recovery": {"replaceAfterSeconds": 9}}, "recovery.replaceAfterSeconds"),
    (
        {"recovery": {"replaceAfterSeconds": 61}},
        "replaceAfterSeconds must be at most nodeLostSeconds",
    ),
    ({"guard": {"action": "Explode"}}, "guard.action"),
    ({"workers": {"template": {"spec": {"nodeName": "node-1", "containers": []}}}}, "nodeName"),
    ({"workers": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}}, "tolerations"),
]


def merged(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(spec)
    for key, value in change.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(("change", "words"), BAD, ids=lambda v: str(v)[:40])
def test_a_wrong_spec_is_refused_with_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(model.SpecError, match=words.replace(".", r"\.")):
        model.parse_spec(merged(a_spec(), change))


@pytest.mark.parametrize(
    ("workers", "parallelism"),
    [
        ({"replicas": 4, "minReplicas": 2, "spares": 2}, {"shard": 2}),
        ({"replicas": 3, "minReplicas": 1, "processesPerWorker": 8}, {"shard": 2, "tensor": 4}),
        ({"replicas": 3, "spares": 1, "processesPerWorker": 8}, {"tensor": 2}),
        ({"replicas": 4, "processesPerWorker": 8}, {"shard": 4, "tensor": 4}),
    ],
)
def test_whole_units_are_taken(workers: dict[str, int], parallelism: dict[str, int]) -> None:
    spec = model.parse_spec(merged(a_spec(), {"workers": workers, "parallelism": parallelism}))
    assert spec.parallelism.mesh == Mesh(**parallelism)


def test_defaults_are_the_documented_ones() -> None:
    spec = model.parse_spec({"workers": a_spec()["workers"], "checkpoint": {"uri": "s3://b/f"}})
    assert spec.checkpoint.save_seconds == 300
    assert (spec.workers.least, spec.workers.most) == (3, 3)
    assert (spec.recovery.hang_seconds, spec.recovery.node_lost_seconds) == (300, 60)
    assert spec.recovery.replace_seconds == 25
    assert (spec.guard.factor, spec.guard.action.value) == (10, "Note")
    assert spec.parallelism.mesh == ONE_RANK


@pytest.mark.parametrize(("lost", "replaced"), [(60, 25), (20, 20), (5, 10)])
def test_a_silent_node_is_given_up_no_later_than_a_lost_one(lost: int, replaced: int) -> None:
    """A silence shorter than 10 s proves nothing."""
    spec = model.parse_spec(merged(a_spec(), {"recovery": {"nodeLostSeconds": lost}}))
    assert spec.recovery.replace_seconds == replaced
