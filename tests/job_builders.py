"""Builders of a job, its pods and its report; tests set only the fields that matter to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep_contract import levels, report
from everstep_operator import model
from everstep_operator.jobs.observed import Ended, Job, NodeFact, Observed, Pod
from everstep_operator.model_status import JobStatus, SlotStatus
from everstep_operator.values import NodeState, NodeVerdict

NOW = 1_000_000.0
UID = "5f1c7d2e-0000-4000-8000-000000000001"
TEMPLATE: dict[str, Any] = {
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "example/train:1",
                "command": ["everstep", "run", "train.py"],
                "resources": {"limits": {"memory": "4Gi", "nvidia.com/gpu": 1}},
            }
        ]
    }
}


def a_spec(*, replicas: int = 3, **changes: Any) -> dict[str, Any]:
    """The spec of a job; `changes` replace its top-level fields."""
    spec: dict[str, Any] = {
        "workers": {"replicas": replicas, "template": TEMPLATE},
        "checkpoint": {"uri": "s3://bucket/folder", "everySteps": 25},
    }
    return {**spec, **changes}


def a_job(spec: Mapping[str, Any] | None = None, **changes: Any) -> Job:
    document = dict(spec or a_spec())
    job = Job(
        namespace="team",
        name="lm",
        uid=UID,
        generation=1,
        resource_version="7",
        created_at=NOW - 60,
        deleting=False,
        spec=model.parse_spec(document),
        raw_template=document["workers"]["template"],
        status=JobStatus(),
    )
    return replace(job, **changes)


def a_slot(slot: int, attempt: int = 1, **changes: Any) -> SlotStatus:
    record = SlotStatus(
        slot=slot, attempt=attempt, pod_uid=f"uid-{slot}-{attempt}", node=f"node-{slot}"
    )
    return record.model_copy(update=changes)


def a_status(replicas: int = 3, **changes: Any) -> JobStatus:
    """The status of a job that has trained in epoch 1."""
    status = JobStatus(slots=[a_slot(s) for s in range(replicas)], epoch=1, step=40)
    return status.model_copy(update=changes)


def a_pod(slot: int, attempt: int = 1, **changes: Any) -> Pod:
    """A running pod on its own node."""
    pod = Pod(
        name=f"lm-{slot}-{attempt}",
        uid=f"uid-{slot}-{attempt}",
        slot=slot,
        attempt=attempt,
        phase="Running",
        node=f"node-{slot}",
        ip=f"10.0.0.{slot + 1}",
        running_since=NOW - 50,
    )
    return replace(pod, **changes)


def an_end(
    cause: report.Cause | None = None, message: str = "", code: int = 0, **changes: Any
) -> Ended:
    found = report.ExitReport(cause=cause, message=message, **changes) if cause else None
    return Ended(
        exit_code=code, reason="Completed" if code == 0 else "Error", message=message, report=found
    )


def a_seen(
    members: Sequence[tuple[int, int]] = ((0, 1), (1, 1), (2, 1)), **changes: Any
) -> levels.Seen:
    """The report of a job that runs epoch 1 at step 42 with these (slot, attempt)."""
    seen = levels.Seen(
        epoch=1,
        running=True,
        step=42,
        members=tuple(
            levels.Member(slot=s, attempt=a, incarnation=1, rank=r, life=1, step=42)
            for r, (s, a) in enumerate(members)
        ),
        committed=levels.CheckpointRef(epoch=1, step=25, bytes=1000, age_ms=3000),
    )
    return replace(seen, **changes)


def a_left(slot: int, attempt: int = 1, step: int = 42) -> levels.Left:
    return levels.Left(slot=slot, attempt=attempt, epoch=1, step=step)


def a_verdict(node: str, state: NodeState, **changes: Any) -> NodeVerdict:
    verdict = NodeVerdict(
        node=node,
        state=state,
        reason="GpuFailed",
        message=f"GPU 0 of {node} has failed",
        incident="inc-1",
    )
    return replace(verdict, **changes)


def an_observation(**changes: Any) -> Observed:
    """Three slots train in epoch 1, and nothing is wrong."""
    observed = Observed(
        job=a_job(status=a_status()),
        pods=tuple(a_pod(s) for s in range(3)),
        seen=a_seen(),
        callers=frozenset(f"uid-{s}-1" for s in range(3)),
        nodes={f"node-{s}": NodeFact(name=f"node-{s}") for s in range(6)},
        template_checked=True,
    )
    return replace(observed, **changes)
