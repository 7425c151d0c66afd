"""`kubectl everstep suspend` and `resume`: how the wait for them ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from everstep_kubectl.commands import switch
from kubectl import recordings
from kubectl.recordings import with_condition


def wait_for(wanted: str, *jobs: Any) -> int:
    events = [("MODIFIED", job) for job in jobs]
    cluster: Any = SimpleNamespace(namespace="team", watch=lambda path, seconds: iter(events))
    arguments: Any = SimpleNamespace(job="tiny", timeout=300.0)
    return switch._await(arguments, cluster, wanted)


def heard(job: dict[str, Any]) -> dict[str, Any]:
    job["status"]["observedGeneration"] = job["metadata"]["generation"]
    return job


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_a_job_that_ends_meanwhile_is_not_waited_for(
    end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    over = heard(with_condition(recordings.job(), end, "True", "Because"))
    assert wait_for("Suspended", over) == 1
    assert f"tiny: {end}: Because" in capsys.readouterr().out


def test_a_job_that_is_suspended_is_reported_with_its_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = heard(with_condition(recordings.job(), "Suspended", "True"))
    assert wait_for("Suspended", recordings.job(), job) == 0
    assert "tiny: Suspended at step" in capsys.readouterr().out
