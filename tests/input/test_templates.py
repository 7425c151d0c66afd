"""A template that the schema accepts leads to a pod or a condition, and never breaks a pass."""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from everstep_contract import names
from everstep_operator import model
from everstep_operator.jobs import observe, plan
from everstep_operator.jobs.actions import CheckTemplate
from everstep_operator.jobs.affinities import PREFERRED
from everstep_operator.jobs.observed import Observed
from input import specs
from job_builders import NOW, TEMPLATE, UID, a_spec

OF_TEMPLATES = [(path, schema) for path, schema in specs.FIELDS if "template" in path]


def observed(template: Any) -> Observed:
    """A job with units of several pods and with spares, whose pods get the most additions."""
    spec = a_spec(parallelism={"shard": 3})
    spec["workers"] = {**spec["workers"], "spares": 3, "template": template}
    metadata = {"namespace": "team", "name": "lm", "uid": UID, "generation": 1}
    job = observe.to_job({"metadata": metadata, "spec": specs.as_stored(spec)})
    return Observed(job=job)


def container(**changes: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{**TEMPLATE["spec"]["containers"][0], **changes}]}}


def with_affinity(**parts: Any) -> dict[str, Any]:
    return {"spec": {**TEMPLATE["spec"], "affinity": parts}}


@st.composite
def templates(draw: st.DrawFn) -> Any:
    spec: Any = a_spec()
    for path, schema in draw(st.lists(st.sampled_from(OF_TEMPLATES), min_size=1, max_size=4)):
        spec = specs.replaced(spec, path, draw(specs.values(schema)))
    return spec["workers"].get("template")


@settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
@given(templates())
def test_no_template_that_can_be_stored_breaks_a_pass(template: Any) -> None:
    given_job = observed(template)
    assume(given_job.job.spec is not None)
    found = plan.plan(given_job, NOW)
    reasons = {c.reason for c in found.status.conditions if c.type == "Running"}
    assert found.actions or reasons == {"TemplateConflict"}


@pytest.mark.parametrize("memory", ["lots", "1e999", "-1Gi", "12Gii", "1.2.3Gi", "9Zi", ""])
def test_a_quantity_that_is_none_goes_to_the_api_server_as_it_stands(memory: str) -> None:
    given_job = observed(container(resources={"limits": {"memory": memory}}))
    checks = [a for a in plan.plan(given_job, NOW).actions if isinstance(a, CheckTemplate)]
    assert checks[0].body["spec"]["containers"][0]["resources"]["limits"]["memory"] == memory


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ({"spec": {"containers": ["x"]}}, "containers.0"),
        ({"spec": {"containers": {"name": "trainer"}}}, "containers"),
        (container(env=[1]), "containers.0.env.0"),
        (with_affinity(podAffinity="x"), "affinity.podAffinity"),
        (with_affinity(podAntiAffinity={PREFERRED: {}}), f"podAntiAffinity.{PREFERRED}"),
        (container(resources={"limits": {"memory": 1.5}}), "limits.memory"),
        ({"spec": {**TEMPLATE["spec"], "terminationGracePeriodSeconds": "1m"}}, "terminationGrace"),
        ({**TEMPLATE, "metadata": {"labels": {"a": 1}}}, "metadata.labels.a"),
    ],
)
def test_a_part_of_the_wrong_type_is_named(template: Any, where: str) -> None:
    given_job = observed(template)
    assert where in given_job.job.spec_error
    told = plan.plan(given_job, NOW).status
    assert where in (told.message or "")
    assert told.state == "Invalid"


def test_names_of_the_contract_that_users_may_not_take_are_explained() -> None:
    text = str(model.RESOURCE.spec_model.model_json_schema())
    assert str(names.AGENT_PORT) in text
    assert "EVERSTEP_" in text
