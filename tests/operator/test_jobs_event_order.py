"""An Event reports what has been done, so it is written after the actions and the status."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs import genuine
from everstep_operator.jobs.actions import DeletePod, Plan
from everstep_operator.jobs.apply import Outcome, Pace, apply_plan
from everstep_operator.jobs.observed import Job
from everstep_operator.kube import Kube
from everstep_operator.values import EventDraft
from job_builders import NOW, a_job, a_status
from toy_jobs import ToyCluster

LEAVES = EventDraft(reason="NodeLeaving", message="slot 0 leaves node-0")


@dataclass
class Recorded(ToyCluster):
    """A toy cluster that records its writes in order."""

    order: list[str] = field(default_factory=list)

    async def create(self, kind: kube.Kind, body: Any, *given: Any, **named: Any) -> Any:
        made = await super().create(kind, body, *given, **named)
        self.order.append(f"create {kind.plural}")
        return made

    async def delete(self, kind: kube.Kind, *given: Any, **named: Any) -> None:
        await super().delete(kind, *given, **named)
        self.order.append(f"delete {kind.plural}")

    async def patch(self, kind: kube.Kind, *given: Any, **named: Any) -> Any:
        patched = await super().patch(kind, *given, **named)
        self.order.append(f"patch {kind.plural}")
        return patched


def a_cluster() -> tuple[Recorded, Job, DeletePod]:
    """A job of two slots, and the deletion of the pod of slot 0."""
    cluster = Recorded()
    status = a_status(2)
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    stored = cluster.put(kube.JOBS, {"metadata": {"name": "lm"}, "status": document})
    labels = {names.LABEL_SLOT: "0", names.LABEL_ATTEMPT: "1"}
    pod = cluster.put(kube.PODS, {"metadata": {"name": "lm-0-1", "labels": labels}, "spec": {}})
    job = replace(
        a_job(status=status),
        resource_version=stored["metadata"]["resourceVersion"],
        raw_status=document,
    )
    delete = DeletePod(name="lm-0-1", uid=pod["metadata"]["uid"], reason="Gone", message="left")
    return cluster, job, delete


async def apply(cluster: Recorded, job: Job, plan: Plan, pace: Pace | None = None) -> Outcome:
    keys = genuine.derive_keys(b"k" * 32, job.uid)
    pace = pace or Pace(figures_seconds=0.0)
    return await apply_plan(cast(Kube, cluster), job, plan, keys, NOW, pace)


def with_step(job: Job, step: int) -> Any:
    return job.status.model_copy(update={"step": step})


async def test_an_event_follows_the_actions_and_the_status() -> None:
    cluster, job, delete = a_cluster()
    plan = Plan(actions=(delete,), status=with_step(job, 7), events=(LEAVES,))
    outcome = await apply(cluster, job, plan)
    assert cluster.order == ["delete pods", "patch resilienttrainingjobs", "create events"]
    assert outcome.untold == ()


async def test_the_events_of_a_plan_that_only_counts_wait_for_the_next_plans_actions() -> None:
    cluster, job, delete = a_cluster()
    counting = Plan(status=with_step(job, 7), counts=True, events=(LEAVES,))
    outcome = await apply(cluster, job, counting)
    assert cluster.order == ["patch resilienttrainingjobs"]
    assert outcome.untold == (LEAVES,)
    cluster.order.clear()
    later = Pace(figures_seconds=0.0, untold=outcome.untold)
    now = replace(job, raw_status=cluster.job()["status"])
    await apply(cluster, now, Plan(actions=(delete,), status=with_step(job, 7)), later)
    assert cluster.order == ["delete pods", "create events"]


async def test_a_status_that_was_not_written_announces_nothing() -> None:
    cluster, job, _ = a_cluster()
    cluster._touch(cluster.job())
    counting = Plan(status=with_step(job, 7), counts=True, events=(LEAVES,))
    outcome = await apply(cluster, job, counting)
    assert (outcome.again, outcome.untold) == (True, ())
    assert "create events" not in cluster.order
