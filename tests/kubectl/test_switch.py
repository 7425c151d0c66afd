"""`kubectl everstep suspend` and `resume`: how the wait for them ends."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep_kubectl import cli
from everstep_kubectl.commands import switch
from kubectl import recordings
from kubectl.recordings import with_condition


def wait_for(wanted: str, *jobs: Any) -> int:
    events = [("MODIFIED", job) for job in jobs]
    cluster: Any = SimpleNamespace(watch=lambda path, seconds: iter(events))
    arguments: Any = SimpleNamespace(job="tiny", timeout=300.0)
    return switch._await(arguments, cluster, recordings.job(), wanted)


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


def test_a_job_that_is_suspended_before_it_has_begun_is_reported_as_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = heard(with_condition(recordings.job(), "Suspended", "True"))
    del job["status"]["step"], job["status"]["checkpoint"]
    assert wait_for("Suspended", job) == 0
    assert "tiny: Suspended before its first step, without a checkpoint" in capsys.readouterr().out


def test_a_job_that_no_operator_has_seen_is_shown_as_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = {**recordings.job(), "status": {}}
    assert wait_for("Suspended", new) == 1
    assert "tiny: New: no operator has looked at it yet" in capsys.readouterr().out


def test_a_job_that_is_being_deleted_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    job = recordings.deleted(recordings.job())
    cluster: Any = SimpleNamespace(get=lambda *_: SimpleNamespace(object=lambda: job))
    arguments: Any = SimpleNamespace(job="tiny", no_wait=False, timeout=300.0)
    assert switch.suspend(arguments, cluster) == 1
    said = "tiny is being deleted: there is nothing to suspend"
    assert said in capsys.readouterr().out


NOWHERE = """#!/bin/sh
# kubectl in a pod without a kubeconfig: it reads its service account's namespace, which is no context's
case "$1" in
config) echo "error: current-context must exist in order to minify" >&2; exit 1 ;;
get)
    case "$2" in
    --raw)
        case "$3" in
        */namespaces/default/*tiny*) printf '{"type":"ADDED","object":%s}\\n' "$(cat "$SUSPENDED")" ;;
        *) echo "not in $3" >&2; exit 1 ;;
        esac ;;
    *) cat "$JOB" ;;
    esac ;;
esac
"""


def test_in_a_pod_without_kubeconfig_the_job_is_watched_where_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suspended = heard(with_condition(recordings.job(), "Suspended", "True"))
    for name, job in (("JOB", recordings.job()), ("SUSPENDED", suspended)):
        (tmp_path / name).write_text(json.dumps(job))
        monkeypatch.setenv(name, str(tmp_path / name))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(NOWHERE)
    kubectl.chmod(0o755)
    monkeypatch.setenv("EVERSTEP_KUBECTL", str(kubectl))
    assert cli.run(["suspend", "tiny", "--timeout", "20"]) == 0
    assert "tiny: Suspended at step" in capsys.readouterr().out
