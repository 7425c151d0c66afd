import threading
from types import SimpleNamespace
from typing import Any

import pytest

from everstep_contract.fetched import WAITS
from everstep_kubectl import readerpod
from everstep_kubectl.cluster import ClusterError
from everstep_kubectl.commands import checkpoints
from everstep_kubectl.commands.checkpoints import parse_log
from kubectl import recordings


def a_pod(**template: object) -> dict:
    job = recordings.job()
    job["spec"]["workers"]["template"]["spec"] |= template
    return readerpod.build_pod(job, ["verify", "s3://b/r"], seconds=60, suffix="abc")


def test_it_has_the_jobs_keys_and_image_and_no_gpu() -> None:
    pod = a_pod()
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "everstep/tiny:test"
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    assert container["command"] == ["everstep", "verify", "s3://b/r"]
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"memory": "2Gi"},
    }


def test_it_may_run_on_the_nodes_that_the_jobs_selector_leaves() -> None:
    """GPU nodes of many clusters have the taint nvidia.com/gpu. Kubernetes adds the toleration only to pods with GPUs:
    the reader found no node if the template has a nodeSelector for GPU nodes.
    """
    own = {"key": "team", "operator": "Exists"}
    found = a_pod(tolerations=[own], nodeSelector={"cloud.google.com/gke-accelerator": "h100"})
    assert found["spec"]["tolerations"] == [own, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert a_pod(containers=[{"name": "trainer", "image": "t"}])["spec"]["tolerations"] == []


def test_it_has_what_opens_the_store_to_the_jobs_pods() -> None:
    """Azure's workload identity and network policies go by labels, service meshes by annotations."""
    job = recordings.job()
    job["spec"]["workers"]["template"]["metadata"] = {
        "labels": {
            "azure.workload.identity/use": "true", "kueue.x-k8s.io/queue-name": "q",
            "everstep.dev/job": "tiny",
        },
        "annotations": {
            "sidecar.istio.io/inject": "false", "k8s.v1.cni.cncf.io/networks": "rdma",
        },
    }  # fmt: skip
    pod = readerpod.build_pod(job, ["verify", "s3://b/r"], seconds=60, suffix="abc")
    assert pod["metadata"]["labels"] == {
        "azure.workload.identity/use": "true",
        "app.kubernetes.io/name": "everstep-reader",
        "everstep.dev/reader": "tiny",
    }
    assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}


def test_it_runs_where_restricted_is_enforced_if_the_jobs_pods_do() -> None:
    """The operator completes a template that says `runAsNonRoot`."""
    containers = [{"name": "trainer", "image": "t"}]
    told = {"securityContext": {"runAsNonRoot": True}}
    spec = a_pod(**told, containers=containers, initContainers=containers)["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"] == {
            "seccompProfile": {"type": "RuntimeDefault"},
            "capabilities": {"drop": ["ALL"]},
            "allowPrivilegeEscalation": False,
        }
    assert "securityContext" not in a_pod(containers=containers)["spec"]["containers"][0]


def test_it_claims_no_device() -> None:
    """Of dynamic resource allocation. It would wait for a GPU that the job itself holds."""
    claims, resources = [{"name": "gpu"}], {"claims": [{"name": "gpu"}]}
    containers = [{"name": "trainer", "image": "t", "resources": resources}]
    spec = a_pod(resourceClaims=claims, containers=containers, initContainers=containers)["spec"]
    assert "resourceClaims" not in spec
    assert "claims" not in spec["containers"][0]["resources"]
    assert "claims" not in spec["initContainers"][0]["resources"]


def test_an_init_container_requests_no_more_than_its_small_limit() -> None:
    limits = {"cpu": "50m", "memory": "64Mi"}
    init = [{"name": "fetch", "image": "f", "resources": {"limits": limits}}]
    (container,) = a_pod(initContainers=init)["spec"]["initContainers"]
    assert container["resources"] == {
        "requests": {"cpu": "10m", "memory": "16Mi"}, "limits": limits,
    }  # fmt: skip


def test_it_ends_by_itself_holds_no_kubernetes_credentials_and_dies_with_the_job() -> None:
    pod = a_pod()
    assert pod["spec"]["activeDeadlineSeconds"] == 60
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["automountServiceAccountToken"] is False
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == recordings.job()["metadata"]["uid"]
    assert owner["controller"] is False


def test_the_operator_does_not_take_it_for_a_worker() -> None:
    assert "everstep.dev/job" not in a_pod()["metadata"]["labels"]


def test_of_several_containers_only_the_trainer_is_kept_without_its_probes() -> None:
    containers = [
        {"name": "sidecar", "image": "s"},
        {
            "name": "trainer", "image": "t", "command": ["/opt/bin/everstep", "run", "train.py"],
            "args": ["--", "--lr=1"], "livenessProbe": {}, "ports": [{"containerPort": 1}],
            "securityContext": {"runAsNonRoot": True},
        },
    ]  # fmt: skip
    (container,) = a_pod(containers=containers)["spec"]["containers"]
    assert container["command"] == ["/opt/bin/everstep", "verify", "s3://b/r"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert not {"args", "livenessProbe", "ports"} & set(container)
    with pytest.raises(LookupError, match="no container named trainer"):
        a_pod(containers=[{"name": "a"}, {"name": "b"}])


def test_its_end_is_its_exit_status() -> None:
    def pod(phase: str, *statuses: dict, **more: str) -> dict:
        return {"status": {"phase": phase, "containerStatuses": list(statuses), **more}}

    ended = {"name": "reader", "state": {"terminated": {"exitCode": 1, "message": " no "}}}
    assert readerpod.describe_ended(pod("Running")) is None
    assert readerpod.describe_ended(pod("Failed", ended)) == (1, "no")
    evicted = pod("Failed", message="the node was low on memory")
    assert readerpod.describe_ended(evicted) == (1, "the node was low on memory")


def test_while_it_waits_it_says_why() -> None:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    assert readerpod.describe_wait({"status": {"containerStatuses": [waiting]}}) == (
        "ErrImagePull: no such image"
    )
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3",
    }
    assert (
        readerpod.describe_wait({"status": {"conditions": [unscheduled]}}) == "Unschedulable: 0/3"
    )


def test_the_last_line_of_its_log_is_the_answer() -> None:
    assert parse_log("p", 1, "", 'pip says hello\n{"ok": false}\n') == {"ok": False}
    with pytest.raises(ClusterError, match=r"^s3://b: access denied \(pod p ended with status 2"):
        parse_log("p", 2, "", "everstep: s3://b: access denied\n")
    with pytest.raises(ClusterError, match=r"^Evicted \(pod p ended with status 1"):
        parse_log("p", 1, "Evicted", "")


def test_a_restored_job_is_the_old_one_under_another_name_and_run() -> None:
    job = recordings.job()
    job["spec"]["suspend"] = True
    job["metadata"]["labels"] = {"team": "a"}
    new = readerpod.build_restored(job, new="b", run="default/tiny-from-400")
    assert new["metadata"] == {"name": "b", "namespace": "default", "labels": {"team": "a"}}
    assert new["spec"]["checkpoint"]["run"] == "default/tiny-from-400"
    assert "suspend" not in new["spec"], "the new job must not be suspended"
    assert "run" not in job["spec"]["checkpoint"], "the old job must not change"


def test_a_restored_job_of_a_queue_waits_until_the_queue_admits_it() -> None:
    """The old one was admitted. Without `suspend` the new one would take room that the queue gives to other jobs."""
    job = recordings.job()
    job["spec"]["suspend"] = False
    job["metadata"]["labels"] = {readerpod.QUEUE: "q"}
    assert readerpod.build_restored(job, new="b", run="r")["spec"]["suspend"] is True


def test_a_restored_job_is_spread_over_nodes_by_its_own_pods() -> None:
    """The selectors name the job's label, as in examples/byte-lm/job.yaml."""
    job = recordings.job()
    name = job["metadata"]["name"]
    spec = job["spec"]["workers"]["template"]["spec"]
    term = {"key": "everstep.dev/job", "operator": "NotIn", "values": [name, "another"]}
    selector = {"matchLabels": {"everstep.dev/job": name, "team": name}, "matchExpressions": [term]}
    spec["topologySpreadConstraints"] = [{"maxSkew": 1, "labelSelector": selector}]
    new = readerpod.build_restored(job, new="b", run="default/tiny-from-400")
    (found,) = new["spec"]["workers"]["template"]["spec"]["topologySpreadConstraints"]
    assert found["labelSelector"] == {
        "matchLabels": {"everstep.dev/job": "b", "team": name},
        "matchExpressions": [{**term, "values": ["b", "another"]}],
    }
    assert selector["matchLabels"]["everstep.dev/job"] == name, "the old job must not change"


def test_a_restored_job_may_use_the_run_that_was_copied_for_it() -> None:
    job = recordings.job()
    job["spec"]["checkpoint"]["ifRunExists"] = "Refuse"
    new = readerpod.build_restored(job, new="b", run="default/tiny-from-400")
    assert "ifRunExists" not in new["spec"]["checkpoint"]


@pytest.mark.parametrize(
    ("new", "run", "named"),
    [
        ("My_Job", "r", "--as: 'My_Job' cannot name a job"),
        ("a" * 51, "r", "--as: "),
        ("tiny", "r", "--as: 'tiny' is the old job"),
        ("b", "../other", "--run: '../other' cannot name a run"),
        ("b", "a b", "--run: 'a b' cannot name a run"),
        ("b", "r" * 254, "--run: "),
    ],
)
def test_what_no_job_can_have_is_refused_before_anything_is_copied(
    new: str, run: str, named: str
) -> None:
    """The cluster here can only be asked for the job."""
    arguments: Any = SimpleNamespace(job="tiny", step=400, new=new, run=run)
    cluster: Any = SimpleNamespace(get=lambda *_: SimpleNamespace(object=recordings.job))
    with pytest.raises(ClusterError) as refused:
        checkpoints.restore(arguments, cluster)
    assert str(refused.value).startswith(named)


def test_names_that_a_job_can_have_are_taken() -> None:
    assert readerpod.find_restore_problem(recordings.job(), new="b" * 50, run="a/B_c.d") == ""


def test_a_pod_whose_time_is_over_says_so() -> None:
    ended = {"name": readerpod.CONTAINER, "state": {"terminated": {"exitCode": 137}}}
    status = {"phase": "Failed", "message": "Pod was active too long", "containerStatuses": [ended]}
    assert readerpod.describe_ended({"status": status}) == (137, "Pod was active too long")


def test_a_pod_that_waits_for_the_store_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told, heard = list[str](), threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        heard.set()

    def watch(*_: object) -> Any:
        yield "MODIFIED", {"status": {"phase": "Running"}}
        assert heard.wait(30), "the user was told nothing"
        yield "MODIFIED", {"status": {"phase": "Succeeded"}}

    log = ["pip says hello\n", f"{WAITS}it is away\n"]
    cluster: Any = SimpleNamespace(watch=watch, lines=lambda *_: iter(log))
    monkeypatch.setattr(checkpoints, "_tell", tell)
    arguments: Any = SimpleNamespace(timeout=300.0)
    checkpoints._await(arguments, cluster, "ns", "p")
    assert told == ["pod p: waiting for the store: it is away"]


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        ({}, "everstep: waiting for the store: it is away\n", "waiting for the store: it is away"),
        ({}, "", "it ran"),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "No", "message": "room"}
                ]
            },
            "",
            "No: room",
        ),
    ],
)
def test_a_pod_that_does_not_end_is_told_with_what_it_waits_for(
    status: dict[str, object], log: str, said: str
) -> None:
    pulls = {"state": {"waiting": {"reason": "Pulling", "message": "the image"}}}
    pods = [{"status": {"containerStatuses": [pulls]}}, {"status": status}]
    cluster: Any = SimpleNamespace(
        watch=lambda *_: (("MODIFIED", pod) for pod in pods),
        begin=lambda *_: SimpleNamespace(text=lambda: log),
    )
    arguments: Any = SimpleNamespace(timeout=300.0)
    with pytest.raises(ClusterError) as raised:
        checkpoints._await(arguments, cluster, "ns", "p")
    told = f"pod p had not ended after 300 s ({said}); --timeout gives it more time"
    assert str(raised.value) == told
