"""Which pods really belong to a job, and which only claim to."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs import genuine, manifests, observe, passes
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.genuine import Place
from everstep_operator.kube import Kube
from everstep_operator.world import World
from job_builders import UID, a_job, a_spec
from toy_jobs import ToyCluster, ToyJob

KEY = b"k" * 32
KEYS = genuine.derive_keys(KEY, UID)
Object = dict[str, Any]
Change = Callable[[Object], Any]


def a_pod(slot: int = 0, attempt: int = 1, *, uid: str = "u1", key: bytes = KEY) -> Object:
    """A pod as the operator creates it and the API server stores it."""
    job = a_job()
    assert job.spec is not None
    proof = genuine.derive_proof(genuine.derive_keys(key, UID), slot, attempt)
    body = manifests.with_proof(manifests.build_pod(job, job.spec, slot, attempt), proof)
    pod = copy.deepcopy(body)
    pod["metadata"]["uid"] = uid
    return pod


def own(*pods: Object, status: Object | None = None) -> list[tuple[int, int, str]]:
    owner = genuine.build_owner(("team", "lm"), UID, status or {}, KEYS)
    return [(p.slot, p.attempt, p.uid) for p in observe.to_pods(pods, owner)]


def relabel(pod: Object) -> None:
    pod["metadata"]["labels"][names.LABEL_ATTEMPT] = "999"


def rename(pod: Object) -> None:
    relabel(pod)
    pod["metadata"]["name"] = "lm-0-999"


def change_owner(**changes: Any) -> Change:
    return lambda pod: pod["metadata"]["ownerReferences"][0].update(changes)


def without_proof(pod: Object) -> None:
    del pod["metadata"]["annotations"][names.ANNOTATION_PROOF]


def with_token_as_proof(pod: Object) -> None:
    pod["metadata"]["annotations"][names.ANNOTATION_PROOF] = KEYS.token


def test_the_operators_own_pod_counts() -> None:
    assert own(a_pod()) == [(0, 1, "u1")]


FORGED: dict[str, Change] = {
    "in another namespace": lambda pod: pod["metadata"].update(namespace="stranger"),
    "without a controller": lambda pod: pod["metadata"].pop("ownerReferences"),
    "owned and not controlled": change_owner(controller=False),
    "controlled by an object of another kind": change_owner(kind="ConfigMap"),
    "controlled by a kind of another group": change_owner(apiVersion="batch/v1"),
    "controlled by a namesake": change_owner(uid="another"),
    "with the name of an attempt that nobody asked for": rename,
    "with a name that is not computed": lambda pod: pod["metadata"].update(name="lm-0-01"),
    "without a proof": without_proof,
    "with the job's token for a proof": with_token_as_proof,
}


@pytest.mark.parametrize("how", FORGED)
def test_a_pod_is_not_the_jobs(how: str) -> None:
    forged = a_pod(uid="forged")
    FORGED[how](forged)
    assert own(forged) == []


def test_the_proof_of_another_operators_key_proves_nothing() -> None:
    assert own(a_pod(key=b"x" * 32)) == []


def test_labels_say_nothing_about_slot_and_attempt() -> None:
    pod = a_pod()
    relabel(pod)
    assert own(pod) == [(0, 1, "u1")]


def test_a_pod_that_status_has_recorded_needs_no_proof() -> None:
    """The pod was created before proofs existed, or somebody removed its annotation."""
    pod = a_pod()
    without_proof(pod)
    assert own(pod, status={"slots": [{"slot": 0, "attempt": 1, "podUid": "u1"}]}) == [(0, 1, "u1")]


def test_a_copy_made_after_the_recorded_pod_has_gone_is_not_the_jobs() -> None:
    status = {"slots": [{"slot": 0, "attempt": 1, "podUid": "u1"}]}
    assert own(a_pod(uid="copy"), status=status) == []


def test_a_status_that_somebody_has_spoilt_has_recorded_nothing() -> None:
    for slots in ("none", ["none"], [{"slot": 0}], None):
        assert own(a_pod(), status={"slots": slots}) == [(0, 1, "u1")]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("lm-0-1", Place(slot=0, attempt=1)),
        ("lm-12-345", Place(slot=12, attempt=345)),
        ("lm-0-1-2", None),
        ("lm-0", None),
        ("lm--1", None),
        ("lm-00-1", None),
        ("lm-0-1x", None),
        ("other-0-1", None),
    ],
)
def test_only_a_computed_name_names_a_slot_and_an_attempt(name: str, place: Place | None) -> None:
    assert genuine.parse_name(name, "lm") == place


def an_operator(cluster: ToyCluster) -> passes.Passes:
    return passes.Passes(
        port=cast(Kube, cluster), world=World(), agents=cast(Agents, ToyJob(cluster=cluster)),
        key=KEY, clock=lambda: cluster.now, steady=lambda: cluster.now, figures_seconds=10.0, verdicts={},
    )  # fmt: skip


async def settle(cluster: ToyCluster, operator: passes.Passes, rounds: int = 12) -> None:
    for _ in range(rounds):
        cluster.feed(operator.world)
        await operator.run(("team", "lm"))
        cluster.tick()


def a_cluster() -> ToyCluster:
    cluster = ToyCluster()
    for number in range(4):
        cluster.add_node(f"node-{number}")
    metadata = {"name": "lm", "namespace": "team", "generation": 1}
    cluster.put(kube.JOBS, {"metadata": metadata, "spec": a_spec(replicas=2)})
    return cluster


def attempts(cluster: ToyCluster) -> list[int]:
    return [slot["attempt"] for slot in cluster.job()["status"]["slots"]]


def forge(cluster: ToyCluster, source: str, attempt: int) -> None:
    """Add a copy of the job's pod `source`, with its proof, that claims `attempt` of slot 0."""
    body = copy.deepcopy(cluster.objects["pods", source])
    for field in ("uid", "creationTimestamp", "resourceVersion"):
        del body["metadata"][field]
    body["metadata"]["name"] = f"lm-0-{attempt}"
    body["metadata"]["labels"][names.LABEL_ATTEMPT] = str(attempt)
    cluster.put(kube.PODS, body)


async def test_a_status_that_was_lost_takes_the_attempts_of_genuine_pods_alone() -> None:
    cluster = a_cluster()
    operator = an_operator(cluster)
    await settle(cluster, operator)
    cluster.mark_deleted(kube.PODS, "lm-0-1")
    await settle(cluster, operator)
    assert attempts(cluster) == [2, 1]
    forge(cluster, "lm-0-2", 999)
    cluster.job()["status"] = {}
    cluster._touch(cluster.job())
    await settle(cluster, an_operator(cluster))
    assert attempts(cluster) == [2, 1], (
        "no attempt may be reused, and a forged attempt must be ignored"
    )
    assert {"lm-0-2", "lm-1-1", "lm-0-999"} <= {p["metadata"]["name"] for p in cluster.pods()}


async def test_a_name_that_a_stranger_has_taken_is_told_and_not_adopted() -> None:
    cluster = a_cluster()
    cluster.put(kube.PODS, {"metadata": {"name": "lm-0-1", "labels": {}}, "spec": {}})
    await settle(cluster, an_operator(cluster))
    (running,) = [c for c in cluster.job()["status"]["conditions"] if c["type"] == "Running"]
    assert running["reason"] == "PodRefused"
    assert "pod lm-0-1 exists and was not made by Everstep: delete it" in running["message"]
