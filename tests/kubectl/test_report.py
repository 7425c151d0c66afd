import argparse
import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from everstep_kubectl import bundle, cluster, redaction
from everstep_kubectl.commands import report
from everstep_lab import chart
from kubectl import recordings
from kubectl.recordings import NOW

SECRET = "hunter2hunter2"


def a_job_with_a_secret() -> dict:
    job = recordings.job()
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["env"] += [
        {"name": "WANDB_API_KEY", "value": SECRET},
        {"name": "EVERSTEP_JOB", "value": "default/tiny"},
    ]
    return job


KUBECTL = """#!/bin/sh
case "$*" in
*" $UNREADABLE"*) echo "Error from server (Forbidden): $UNREADABLE is forbidden" >&2; exit 1;;
esac
echo '{"kind": "List", "items": []}'
"""


@pytest.mark.parametrize(
    ("unreadable", "why"),
    [
        ("nodes", r"there is no job 'typo' here; -n"),
        ("resilienttrainingjobs", r"^jobs\.json: .*Forbidden"),
    ],
)
def test_a_job_that_there_is_not_is_named_whatever_else_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str, why: str
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv(cluster.PROGRAM, str(program))
    monkeypatch.setenv("UNREADABLE", unreadable)
    asked = argparse.Namespace(job="typo", operator_namespace="everstep-system")
    with pytest.raises(cluster.NotFound, match=why):
        report.run(asked, cluster.Cluster())


def unpacked(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {m.name: tar.extractfile(m).read().decode() for m in tar.getmembers()}  # type: ignore[union-attr]


def test_of_the_operators_namespace_only_its_own_pods_are_asked_for() -> None:
    """It may be installed in one that others use, too, and the logs of all pods that are found are read."""
    asked = {q.path: q.arguments for q in bundle.build_objects(None, "monitoring")}
    for path in ("operator/pods.json", "operator/deployments.json"):
        assert asked[path][1:] == ("-n", "monitoring", "-l", bundle.OPERATOR)
    helpers = (chart.FOLDER / "templates" / "_names.tpl").read_text()
    hooks = [chart.FOLDER / "templates" / p for p in ("hook-release.yaml", "tests/installed.yaml")]
    named = re.findall(
        r"kubernetes.io/name: (\S+)", helpers + "".join(p.read_text() for p in hooks)
    )
    assert set(named) == set(re.findall(r"everstep-\w+", bundle.OPERATOR))


def test_a_value_of_a_variable_is_nowhere_in_the_bundle() -> None:
    texts = {"logs/a.log": f"login with {SECRET} ok\nstep 5\n"}
    archive = bundle.build_archive("r", {"jobs.json": [a_job_with_a_secret()]}, texts, NOW)
    assert SECRET.encode() not in gzip.decompress(archive)
    files = unpacked(archive)
    assert files["r/logs/a.log"] == "login with [redacted] ok\nstep 5\n"
    (job,) = json.loads(files["r/jobs.json"])
    environment = job["spec"]["workers"]["template"]["spec"]["containers"][0]["env"]
    by_name = {e["name"]: e["value"] for e in environment}
    assert by_name["WANDB_API_KEY"] == "[redacted]"
    assert by_name["EVERSTEP_JOB"] == "default/tiny"


def test_the_argument_of_a_flag_for_a_credential_is_nowhere_in_the_bundle() -> None:
    """A command is a list: the flag and its argument are two strings."""
    job = recordings.job()
    command = ["everstep", "run", "train.py", "--", "--wandb-api-key", SECRET, "--token", "-v"]
    job["spec"]["workers"]["template"]["spec"]["containers"][0]["command"] = command
    texts = {"logs/a.log": f"login with {SECRET} ok\n"}
    archive = bundle.build_archive("r", {"jobs.json": [job]}, texts, NOW)
    assert SECRET.encode() not in gzip.decompress(archive)
    (found,) = json.loads(unpacked(archive)["r/jobs.json"])
    shown = found["spec"]["workers"]["template"]["spec"]["containers"][0]["command"]
    assert shown == [*command[:5], "[redacted]", *command[6:]]


def test_the_operators_key_is_nowhere_in_the_bundle() -> None:
    """The chart takes it from a Secret; whoever installs the operator in another way may write it down."""
    variable = {"name": "EVERSTEP_OPERATOR_KEY", "value": SECRET}
    argument = "--key=another-key-of-it"
    path = {"name": "EVERSTEP_OPERATOR_KEY_FILE", "value": "/etc/everstep/key/key"}
    container = {"args": [argument, "--key", "a-third-key-of-it"], "env": [variable, path]}
    texts = {"operator/a.log": f"the key is {SECRET}, a-third-key-of-it\n"}
    pods = [{"spec": {"containers": [container]}}]
    archive = gzip.decompress(bundle.build_archive("r", {"operator/pods.json": pods}, texts, NOW))
    for secret in (SECRET, "another-key", "a-third-key"):
        assert secret.encode() not in archive
    assert b"/etc/everstep/key/key" in archive


def test_what_was_applied_is_not_carried_along_unredacted() -> None:
    (cleaned,) = redaction.clean_object([recordings.job()])
    assert (
        "kubectl.kubernetes.io/last-applied-configuration" not in cleaned["metadata"]["annotations"]
    )


def test_what_looks_like_a_credential_is_taken_out_of_any_text() -> None:
    found = redaction.clean_text(
        "AWS_SECRET_ACCESS_KEY=abc/def+ghi token: xyzw1234 --password swordfish "
        "AKIAIOSFODNN7EXAMPLE Bearer abcdefgh12345 s3://user:pass@host/b "
        "eyJhbGciOiJI.eyJzdWIiOiIx.sig hf_abcdefghijklmnop "
        "AZURE_STORAGE_ACCOUNT_KEY=azure1== AccountKey=azure2== Authorization: Basic dXNlcjpw"
    )
    for secret in ("abc/def", "xyzw", "swordfish", "AKIA", "abcdefgh1", "user:pass", "eyJ", "hf_a"):
        assert secret not in found, secret
    for secret in ("azure1", "azure2", "dXNlcjpw"):
        assert secret not in found, secret
    assert "AWS_SECRET_ACCESS_KEY=[redacted]" in found
    assert "s3://[redacted]@host/b" in found


def test_an_address_that_opens_an_object_by_itself_does_so_no_more() -> None:
    """Signed addresses of Azure, AWS and Google, and a token in the place of a user's name."""
    found = redaction.clean_text(
        "GET https://a.blob.core.windows.net/c/d?sv=2024&sig=ab%2Fcd12 "
        "https://b.s3.amazonaws.com/d?X-Amz-Date=1&X-Amz-Signature=0a1b2c3d "
        "https://storage.googleapis.com/b/d?X-Goog-Signature=4e5f6a7b&x=1 "
        "git+https://glpat-xyz123@gitlab.example.com/d.git"
    )
    for secret in ("ab%2Fcd12", "0a1b2c3d", "4e5f6a7b", "glpat"):
        assert secret not in found, secret
    assert "sv=2024&sig=[redacted]" in found
    assert "git+https://[redacted]@gitlab.example.com" in found


def test_ordinary_lines_and_fields_stay_as_they_are() -> None:
    line = "everstep event=worker_runs slot=0 attempt=4 rank=0 pid=13070 applied=8012 bytes=12168"
    assert redaction.clean_text(line) == line
    assert (
        redaction.clean_text("--key-file=/etc/key key=chunks/a")
        == "--key-file=/etc/key key=chunks/a"
    )
    image = "docker-pullable://nginx@sha256:0123, https://example.com/a@b?design=2"
    assert redaction.clean_text(image) == image
    spec = {"automountServiceAccountToken": False, "secretName": "object-store", "replicas": 2}
    assert redaction.clean_object(spec) == spec


def test_each_container_gives_its_log_and_that_of_the_life_before() -> None:
    status = [{"name": "trainer", "restartCount": 1}, {"name": "side", "restartCount": 0}]
    pod = {
        "metadata": {"name": "p", "namespace": "n"},
        "status": {"containerStatuses": status, "initContainerStatuses": [{"name": "fetch"}]},
    }
    asked = bundle.build_logs([pod], "logs", 50)
    first, *asked = asked
    assert first.arguments[:6] == ("logs", "p", "-n", "n", "-c", "fetch")
    assert [q.path for q in asked] == [
        "logs/p.trainer.log",
        "logs/p.trainer.before.log",
        "logs/p.side.log",
    ]
    assert asked[1].arguments[-1] == "--previous"


def test_the_same_views_are_in_it_as_the_commands_give() -> None:
    texts = bundle.build_texts([recordings.job()], recordings.quarantines(), NOW)
    assert texts["tiny.status.txt"].startswith("default/tiny: Running")
    assert "inc-7b7c4a3c08" in texts["tiny.timeline.txt"]
