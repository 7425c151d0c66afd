"""The operator sends `checkpoint.pin` to the job as a level, and status shows the checkpoint with that name."""

from typing import Any

import pytest

from everstep_contract import levels
from everstep_operator import model
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import JobStatus, PinnedStatus
from job_builders import NOW, a_job, a_seen, a_spec, a_status, an_observation

PINNED = levels.Pinned(name="before-lunch", epoch=1, step=42, manifest="manifests/1-42-x.json")
KNOWN = PinnedStatus(name="before-lunch", epoch=1, step=42, manifest="manifests/1-42-x.json")


def asking(pin: str | None = "before-lunch", **changes: Any) -> Observed:
    checkpoint = {"uri": "s3://bucket/folder", "everySteps": 25}
    if pin is not None:
        checkpoint["pin"] = pin
    known = changes.pop("known", None)
    job = a_job(a_spec(checkpoint=checkpoint), status=a_status(pinned=known))
    return an_observation(job=job, **changes)


def status(observed: Observed) -> JobStatus:
    return plan(observed, NOW).status


def test_the_name_is_told_to_the_job() -> None:
    for pin, told in (("before-lunch", "before-lunch"), (None, "")):
        wanted = plan(asking(pin), NOW).wanted
        assert wanted is not None
        assert wanted.pin == told


def test_status_shows_the_checkpoint_once_the_job_has_it() -> None:
    assert status(asking()).pinned is None
    assert status(asking(seen=a_seen(pinned=PINNED))).pinned == KNOWN


def test_it_stays_while_no_agent_answers_and_goes_with_the_wish() -> None:
    assert status(asking(known=KNOWN, seen=None)).pinned == KNOWN
    assert status(asking(known=KNOWN, seen=a_seen())).pinned == KNOWN
    assert status(asking("another", known=KNOWN, seen=a_seen(pinned=PINNED))).pinned is None
    assert status(asking(None, known=KNOWN)).pinned is None


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a" * 64])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    spec = a_spec(checkpoint={"uri": "s3://bucket/folder", "pin": name})
    with pytest.raises(ValueError, match="pin"):
        model.parse_spec(spec)
