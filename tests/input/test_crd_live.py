"""A real API server refuses what the CRDs' model refuses, and names the field and the fix."""

import copy
import json
from typing import Any

import pytest

from everstep_lab import Lab
from everstep_operator import kube
from everstep_operator.jobs import patch_body
from everstep_operator.kube import Kube
from job_builders import a_spec

pytestmark = pytest.mark.lab

BAD: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"minReplicas": 4}}, "spec.workers.minReplicas"),
    ({"workers": {"maxReplicas": 2}}, "spec.workers.maxReplicas"),
    ({"workers": {"replicas": 0}}, "spec.workers.replicas"),
    ({"checkpoint": {"uri": "http://x/y"}}, 'uri is "http://x/y"'),
    ({"checkpoint": {"everySeconds": 5}}, "keep one of them"),
    ({"checkpoint": {"run": "../other"}}, "spec.checkpoint.run"),
    ({"checkpoint": {"stagingMemory": "5GB"}}, 'stagingMemory is "5GB": write a whole number'),
    ({"checkpoint": {"peerBandwidth": "fast"}}, 'peerBandwidth is "fast": write a whole number'),
    ({"checkpoint": {"readBackBandwidth": "9k"}}, 'readBackBandwidth is "9k": write'),
    (
        {"checkpoint": {"pin": "Epoch 3"}},
        "pin is \"Epoch 3\": use at most 63 lower-case letters, digits and '-'",
    ),
    ({"checkpoint": {"diskPath": "data"}}, 'diskPath is "data": write an absolute path'),
    ({"parallelism": {"shard": 0}}, "spec.parallelism.shard"),
    ({"parallelism": {"pipeline": 2}}, "pipeline: not yet"),
    ({"parallelism": {"context": 2}}, "context: not yet"),
    (
        {"parallelism": {"shard": 2, "tensor": 2}},
        "replicas is 3, but a unit of 4 ranks (parallelism) takes 4 pods (processesPerWorker 1): "
        "use a multiple of 4",
    ),
    (
        {"workers": {"replicas": 4, "minReplicas": 3}, "parallelism": {"shard": 2}},
        "spec.workers.minReplicas",
    ),
    (
        {"workers": {"replicas": 4, "spares": 1}, "parallelism": {"shard": 2}},
        "spares is 1, but a unit of 2 ranks",
    ),
    (
        {"workers": {"processesPerWorker": 4}, "parallelism": {"shard": 3, "tensor": 2}},
        "a unit of parallelism has 6 ranks and a pod 4 (processesPerWorker)",
    ),
    ({"recovery": {"replaceAfterSeconds": 9}}, "spec.recovery.replaceAfterSeconds"),
    ({"recovery": {"replaceAfterSeconds": 61}}, "lower replaceAfterSeconds or raise"),
    ({"guard": {"action": "Explode"}}, "spec.guard.action"),
    ({"workers": {"template": {"spec": {"nodeName": "node-1"}}}}, "use nodeSelector or affinity"),
    (
        {"workers": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}},
        "name the keys",
    ),
]


@pytest.fixture
async def port(lab: Lab) -> Any:
    found = await Kube.connect(kubeconfig=str(lab.kubeconfig))
    yield found
    await found.close()


def a_document(change: dict[str, Any], name: str = "wrong") -> dict[str, Any]:
    spec = merged(a_spec(), change)
    return {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "ResilientTrainingJob",
        "metadata": {"name": name, "namespace": "default"}, "spec": spec,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "refused"), [("nvlink-replays", ""), ("NVLink replays", "spec.evidence[0].kind")]
)
async def test_evidence_of_any_kind_is_stored_if_it_is_written_like_one(
    port: Kube, kind: str, refused: str
) -> None:
    evidence = {
        "machine": "m", "gpu": "GPU-a", "kind": kind, "firstSeen": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    spec = {
        "nodeName": "node-1", "incident": "inc-1", "verdict": "Leaving", "reason": "GpuLinkReplays",
        "message": "m", "decidedAt": "2026-11-21T10:00:00Z", "evidence": [evidence],
    }  # fmt: skip
    document = {
        "apiVersion": "everstep.dev/v1alpha1", "kind": "NodeQuarantine",
        "metadata": {"name": "a-new-kind"}, "spec": spec,
    }  # fmt: skip
    if not refused:
        stored = await port.create(kube.QUARANTINES, document, dry_run=True)
        assert stored["spec"]["evidence"][0]["kind"] == kind
        return
    with pytest.raises(kube.Invalid) as raised:
        await port.create(kube.QUARANTINES, document, dry_run=True)
    assert refused in raised.value.message


def merged(spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(spec)
    for key, value in change.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


async def test_the_api_server_refuses_what_the_model_refuses(port: Kube) -> None:
    for change, words in BAD:
        with pytest.raises(kube.Invalid) as refused:
            await port.create(kube.JOBS, a_document(change), "default", dry_run=True)
        assert words in refused.value.message, change


async def test_a_name_that_would_not_fit_a_pods_is_refused(port: Kube) -> None:
    for name in ("a" * 51, "with.dots"):
        with pytest.raises(kube.Invalid, match=r"metadata\.name"):
            await port.create(kube.JOBS, a_document({}, name), "default", dry_run=True)


async def test_one_slot_of_many_is_written_in_a_few_hundred_bytes(port: Kube) -> None:
    """The API server applies the operator's JSON patch by index, and refuses it for any version but
    the newest.
    """
    made = await port.create(kube.JOBS, a_document({"suspend": True}, "large"), "default")
    try:
        slots = [{"slot": s, "attempt": 1, "podUid": f"uid-{s}"} for s in range(2000)]
        patch = {"status": {"state": "Starting", "slots": slots}}
        stored = await port.patch(kube.JOBS, "large", patch, "default", sub="status")
        old, version = stored["status"], stored["metadata"]["resourceVersion"]
        slots[1234] = {**slots[1234], "attempt": 2, "cause": "NodeLost"}
        shorter, _ = patch_body.build_bodies(version, old, {"slots": slots})
        assert len(json.dumps(shorter)) < 400
        written = await port.patch(kube.JOBS, "large", shorter, "default", sub="status")
        assert written["status"] == {**old, "slots": slots}
        with pytest.raises(kube.Conflict):
            await port.patch(kube.JOBS, "large", shorter, "default", sub="status")
        await port.patch(
            kube.JOBS, "large", {"status": {"slots": slots[:9]}}, "default", sub="status"
        )
        with pytest.raises(kube.Invalid):
            await port.patch(kube.JOBS, "large", shorter, "default", sub="status")
    finally:
        await port.delete(kube.JOBS, "large", "default", uid=made["metadata"]["uid"])


FIXED = (
    {"checkpoint": {"uri": "s3://other/place"}},
    {"checkpoint": {"run": "another"}},
    {"checkpoint": {"ifRunExists": "Refuse"}},
    {"workers": {"processesPerWorker": 2}},
    {"workers": {"replicas": 4}, "parallelism": {"shard": 2}},
)


async def test_a_job_of_units_is_scaled_by_whole_units(port: Kube) -> None:
    shape = {
        "suspend": True,
        "workers": {"replicas": 4, "maxReplicas": 8},
        "parallelism": {"shard": 2},
    }
    made = await port.create(kube.JOBS, a_document(shape, "units"), "default")
    try:
        assert made["spec"]["parallelism"] == {"shard": 2, "tensor": 1}
        for count in (6, 2):
            scale = {"spec": {"replicas": count}}
            await port.patch(kube.JOBS, "units", scale, "default", sub="scale")
        with pytest.raises(kube.Invalid, match="replicas is 3, but a unit of 2 ranks"):
            await port.patch(kube.JOBS, "units", {"spec": {"replicas": 3}}, "default", sub="scale")
    finally:
        await port.delete(kube.JOBS, "units", "default", uid=made["metadata"]["uid"])


async def test_what_no_running_job_can_follow_cannot_change(port: Kube) -> None:
    good = a_document({"suspend": True}, "stays")
    made = await port.create(kube.JOBS, good, "default")
    try:
        for change in FIXED:
            with pytest.raises(kube.Invalid, match=r"cannot change.*create a new job"):
                await port.patch(kube.JOBS, "stays", {"spec": change}, "default")
    finally:
        await port.delete(kube.JOBS, "stays", "default", uid=made["metadata"]["uid"])
