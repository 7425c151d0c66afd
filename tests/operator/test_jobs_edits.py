"""An edit of the spec reaches the running job or is refused.

`observedGeneration` says which edits have reached it.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from everstep_operator import model
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_parallelism import Parallelism
from everstep_operator.model_status import JobStatus
from job_builders import NOW, a_job, a_pod, a_seen, a_spec, a_status, an_end, an_observation

README = Path(__file__).parents[2] / "operator" / "README.md"
CHECKPOINT = {"uri": "s3://bucket/folder", "everySteps": 25}
EDITS: dict[str, tuple[dict[str, Any], str, object]] = {
    "recovery.hangSeconds": ({"recovery": {"hangSeconds": 7}}, "hang_seconds", 7.0),
    "recovery.startupSeconds": ({"recovery": {"startupSeconds": 8}}, "startup_seconds", 8.0),
    "recovery.drainTimeoutSeconds": (
        {"recovery": {"drainTimeoutSeconds": 9}},
        "drain_seconds",
        9.0,
    ),
    "recovery.gangSeconds": ({"recovery": {"gangSeconds": 10}}, "gang_seconds", 10.0),
    "recovery.inPlace": ({"recovery": {"inPlace": False}}, "in_place", False),
    "recovery.onLoss": ({"recovery": {"onLoss": "Wait"}}, "on_loss", "Wait"),
    "recovery.belowMinSeconds": (
        {"recovery": {"belowMinSeconds": 60}},
        "below_min_seconds",
        60.0,
    ),
    "recovery.maxRedoSeconds": ({"recovery": {"maxRedoSeconds": 5}}, "max_redo_seconds", 5.0),
    "checkpoint.keep": ({"checkpoint": {**CHECKPOINT, "keep": 11}}, "keep", 11),
    "guard.factor": ({"guard": {"factor": 12}}, "guard_factor", 12.0),
    "guard.action": ({"guard": {"action": "SaveAndStop"}}, "guard_action", "SaveAndStop"),
}
"""Field → (an edit of it, the setting that the job receives, its value)."""


def edited(generation: int = 2, **spec: Any) -> Observed:
    """A training job that acted on generation 1 and now has this generation and spec."""
    status = a_status(observed_generation=1)
    job = a_job(a_spec(**spec), status=status, generation=generation)
    return an_observation(job=job, seen=a_seen(generation=1))


# --- what an edit does ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", EDITS)
def test_an_edited_setting_is_told_to_the_running_job(field: str) -> None:
    change, name, value = EDITS[field]
    wanted = plan(edited(**change), NOW).wanted
    assert wanted is not None
    assert wanted.generation == 2
    assert getattr(wanted.settings, name) == value


def leaves(kind: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        here = f"{path}{field.alias or name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and name != "template":
            yield from leaves(inner, f"{here}.")
        else:
            yield here


def read_table() -> dict[str, str]:
    """Field → what an edit of it does, as operator/README.md says."""
    text = README.read_text().partition("## Edits of a running job")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return {name: says.strip() for cell, says in rows for name in re.findall(r"`([\w.]+)`", cell)}


def test_the_readme_says_what_an_edit_of_each_field_does() -> None:
    assert set(read_table()) == set(leaves(model.JobSpec))


def test_what_the_readme_calls_sent_is_sent_and_what_it_calls_refused_is_refused() -> None:
    table = read_table()
    sent = {f for f, says in table.items() if says.startswith(("sent", "next epoch"))}
    intervals = {"checkpoint.everySteps", "checkpoint.everySeconds"}
    assert sent == set(EDITS) | intervals | {"checkpoint.pin"}
    refused = {f for f, says in table.items() if says.startswith("refused")}
    parts: dict[str, Any] = {
        "workers": model.Workers,
        "checkpoint": model.Checkpoint,
        "parallelism": Parallelism,
    }
    immutable = {
        f"{at}{rule.at}"
        for at, kind in parts.items()
        for rule in kind.rules
        if "oldSelf" in rule.cel
    }
    assert refused == immutable


# --- observedGeneration -----------------------------------------------------------------------------------


def generation(observed: Observed) -> int | None:
    return plan(observed, NOW).status.observed_generation


def test_an_edit_is_observed_once_the_job_acts_on_it() -> None:
    observed = edited(recovery={"hangSeconds": 7})
    assert generation(observed) == 1
    assert generation(replace(observed, seen=a_seen(generation=2))) == 2


def test_an_edit_that_nobody_has_confirmed_is_not_claimed() -> None:
    silent = replace(edited(), seen=None, callers=frozenset())
    assert generation(silent) == 1
    older = replace(edited(), seen=a_seen())
    assert generation(older) == 1, "an older agent does not report it"


def test_an_edit_that_concerns_no_agent_is_observed_at_once() -> None:
    new = an_observation(job=a_job(generation=1), pods=(), seen=None)
    assert generation(new) == 1
    pulling = tuple(a_pod(s, running_since=None, phase="Pending") for s in range(3))
    assert generation(replace(edited(), pods=pulling, seen=None)) == 2


def test_an_edit_that_cannot_be_acted_on_is_not_observed() -> None:
    unreadable = replace(edited(), pods=(), seen=None)
    job = replace(unreadable.job, spec=None, spec_error="spec.workers.replicas: …")
    assert generation(replace(unreadable, job=job)) == 1
    spec = a_spec()
    spec["workers"] = {**spec["workers"], "template": {"spec": {"containers": []}}}
    clash = a_job(spec, status=a_status(observed_generation=1), generation=2)
    assert generation(replace(unreadable, job=clash)) == 1


def test_an_edit_is_not_observed_before_the_api_server_has_accepted_its_first_pod() -> None:
    unchecked = replace(edited(), pods=(), seen=None, template_checked=False)
    unchecked = replace(
        unchecked, job=replace(unchecked.job, status=JobStatus(observed_generation=1))
    )
    assert generation(unchecked) == 1
    assert generation(replace(unchecked, template_checked=True)) == 2
    up = tuple(a_pod(s, running_since=None, phase="Pending") for s in range(3))
    assert generation(replace(unchecked, pods=up)) == 2, "no pod is to be created"


def test_after_the_end_there_is_nothing_to_act_on() -> None:
    ended = an_end(code=0)
    pods = tuple(a_pod(s, phase="Succeeded", ended=ended, running_since=None) for s in range(3))
    finished = replace(edited(), pods=pods, seen=a_seen(done=True))
    assert generation(finished) == 2


def test_a_status_that_was_lost_is_no_claim() -> None:
    job = a_job(generation=5, status=JobStatus())
    assert generation(an_observation(job=job, seen=a_seen(generation=4))) is None
