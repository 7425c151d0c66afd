"""The cost of an event does not grow with the fleet.

The tests count bytecodes at one size and at ten times that size.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import job_builders
from everstep_operator import kube
from everstep_operator.handlers import VerdictBoard, Watchers
from everstep_operator.health.loop import HealthLoop
from everstep_operator.jobs import passes
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model import parse_spec
from everstep_operator.scheduler import Scheduler
from everstep_operator.settings import Settings
from everstep_operator.values import NodeState, NodeVerdict
from everstep_operator.world import World
from fake_exporter import an_exporter, running_exporter
from fleet_given import Fleet
from job_builders import NOW
from toy_cluster import ToyCluster, a_node_object
from work import count, count_async

SMALL, LARGE = 30, 300
PAGE = "".join(
    f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="{uuid}"}} 0\n'
    f'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{gpu="0",UUID="{uuid}"}} 5\n'
    for uuid in ("GPU-a", "GPU-b")
)
SLACK = 1.3
"""Tolerance: sets and dicts of another size take slightly more or fewer bytecodes."""


def a_node(name: str, version: int = 1, ready: str = "True") -> dict[str, Any]:
    node = a_node_object(name)
    node["metadata"]["resourceVersion"] = str(version)
    node["status"]["conditions"] = [{"type": "Ready", "status": ready, "message": "m"}]
    return node


def a_pod(index: int) -> dict[str, Any]:
    """Pod number `index`: each job has two pods, and each pod has a node of its own."""
    job = f"job-{index // 2}"
    owner = {"kind": "ResilientTrainingJob", "name": job, "uid": f"uid-{job}", "controller": True}
    metadata = {
        "name": f"{job}-{index % 2}-1", "namespace": "team", "uid": f"pod-{index}",
        "resourceVersion": "1", "ownerReferences": [owner],
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"nodeName": f"node-{index}"}}


def a_world(size: int) -> World:
    world = World()
    for index in range(size):
        world.nodes.put(a_node(f"node-{index}"))
        world.pods.put(a_pod(index))
    world.ready = True
    return world


async def _no_pass(key: tuple[str, str]) -> None:
    return None


def a_verdict(node: str) -> NodeVerdict:
    return NodeVerdict(node=node, state=NodeState.LEAVING, reason="GpuFatalXid", message="m")


def flip_readiness(size: int) -> int:
    world = a_world(size)
    woken: list[tuple[str, str]] = []
    scheduler = Scheduler(_no_pass)
    scheduler.wake = lambda key, after=0.0: woken.append(key)  # type: ignore[method-assign, assignment]
    watchers = Watchers(world, scheduler, lambda: None, lambda quarantine: None)
    event = {"type": "MODIFIED", "object": a_node("node-3", version=2, ready="False")}
    work = count(lambda: watchers.see_node(event))
    assert woken == [("team", "job-1")]
    return work


def publish_one(size: int) -> int:
    world, woken = a_world(size), []
    board = VerdictBoard(
        passes.Passes(
            port=None, world=world, agents=None, key=b"", clock=lambda: 0.0, figures_seconds=1.0,  # type: ignore[arg-type]
        ),
        woken.append,
    )  # fmt: skip
    board.publish({}, {})
    work = count(lambda: board.publish({"node-3": a_verdict("node-3")}, {}))
    assert woken == [("team", "job-1")]
    return work


@pytest.mark.parametrize("event", [flip_readiness, publish_one], ids=lambda act: act.__name__)
def test_an_event_about_one_node_costs_the_same_whatever_pods_there_are(event: Any) -> None:
    small, large = event(SMALL), event(LARGE)
    print(f"{event.__name__}: {small} bytecodes with {SMALL} pods, {large} with {LARGE}")
    assert large <= SLACK * small


class _Deaf:
    def publish(self, *given: object) -> None:
        return None


@asynccontextmanager
async def a_loop(size: int) -> AsyncIterator[tuple[HealthLoop, World, ToyCluster]]:
    """A loop that watches `size` healthy nodes and has already noted the GPUs of each."""
    async with running_exporter() as exporter:
        cluster, world = ToyCluster(), World()
        cluster.add_nodes(size)
        ports = [{"name": "metrics", "containerPort": exporter.port}]
        cluster.pods = [
            an_exporter(f"dcgm-{i}", node=f"node-{i}", ports=ports, address="127.0.0.1")
            for i in range(size)
        ]
        world.nodes.replace(cluster._of("nodes"), str(cluster.version))
        world.ready = True
        clock = itertools.count(1_000_000)
        loop = HealthLoop(
            kube=cluster,  # type: ignore[arg-type]
            world=world,
            settings=Settings(scrape_seconds=1.0),
            verdicts=_Deaf(),
            clock=lambda: float(next(clock)),
        )
        exporter.page = PAGE
        await loop.scrape_once()
        for _ in range(3):
            await loop.pass_once()
        assert len(cluster.writes) == size, "each node's GPUs are noted once"
        yield loop, world, cluster
        await loop.close()


async def pass_after_a_change(size: int) -> int:
    async with a_loop(size) as (loop, world, cluster):
        cluster.change_node("node-3", {"spec": {"unschedulable": True}})
        world.nodes.put(cluster.node("node-3"))
        return await count_async(loop.pass_once)


async def hear_of_a_death(size: int) -> int:
    async with a_loop(size) as (loop, _, _):
        return count(lambda: loop.rank_died("node-3"))


@pytest.mark.parametrize(
    "event", [pass_after_a_change, hear_of_a_death], ids=lambda act: act.__name__
)
async def test_a_fleet_pass_costs_the_same_whatever_healthy_nodes_there_are(event: Any) -> None:
    small, large = await event(SMALL), await event(LARGE)
    print(f"{event.__name__}: {small} bytecodes with {SMALL} nodes, {large} with {LARGE}")
    assert large <= SLACK * small


@pytest.mark.parametrize("observe_only", [False, True], ids=["armed", "observing"])
def test_a_plan_grows_with_the_nodes_at_fault_and_no_faster(observe_only: bool) -> None:
    def work(size: int) -> int:
        """Plan for `size` nodes at fault, half of them in quarantine."""
        fleet = Fleet(observe_only=observe_only)
        fleet.cluster.add_nodes(size)
        for index in range(size):
            fleet.break_(f"node-{index}", kind="xid")
            if index % 2:
                fleet.cluster.add(kube.QUARANTINES, a_quarantine(f"node-{index}"))
        return count(fleet.plan)

    small, large = work(SMALL), work(LARGE)
    print(f"{small} bytecodes with {SMALL} nodes at fault, {large} with {LARGE}")
    assert large <= SLACK * small * LARGE / SMALL


def a_quarantine(node: str) -> dict[str, Any]:
    spec = {
        "nodeName": node, "incident": f"inc-{node}", "verdict": "Leaving", "reason": "GpuFatalXid",
        "message": "m", "decidedAt": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    return {"metadata": {"name": f"q-{node}"}, "spec": spec}


def a_large_job(pods: int) -> Observed:
    slots = range(pods)
    return job_builders.an_observation(
        job=job_builders.a_job(
            job_builders.a_spec(replicas=pods), status=job_builders.a_status(pods)
        ),
        pods=tuple(job_builders.a_pod(s) for s in slots),
        seen=job_builders.a_seen([(s, 1) for s in slots]),
        callers=frozenset(f"uid-{s}-1" for s in slots),
        nodes={f"node-{s}": NodeFact(name=f"node-{s}") for s in slots},
    )


def test_the_plan_of_a_job_grows_with_its_pods_and_no_faster() -> None:
    small, large = (count(lambda n=n: plan(a_large_job(n), NOW)) for n in (SMALL, LARGE))
    assert large < small * LARGE / SMALL * SLACK


def all_pods_are(**changes: Any) -> Callable[[Observed], Observed]:
    return lambda job: replace(job, pods=tuple(replace(p, **changes) for p in job.pods))


def all_nodes_are(state: NodeState) -> Callable[[Observed], Observed]:
    def change(job: Observed) -> Observed:
        found = (job_builders.a_verdict(n, state, incident=f"inc-{n}") for n in job.nodes)
        return replace(job, verdicts={verdict.node: verdict for verdict in found})

    return change


def is_one_pod_now(job: Observed) -> Observed:
    return replace(job, job=replace(job.job, spec=parse_spec(job_builders.a_spec(replicas=1))))


def moves_all_slots(job: Observed) -> Observed:
    """Its pods have vanished, and this has been counted."""
    return replace(job, job=replace(job.job, status=plan(vanishes(job), NOW).status), pods=())


def vanishes(job: Observed) -> Observed:
    return replace(job, pods=())


def has_waited_too_long_for_commits(job: Observed) -> Observed:
    """All pods but one have been asked to leave, and the store has been away for minutes."""
    asked = to_stamp(NOW - 300)
    slots = [job_builders.a_slot(s, leaving_since=asked) for s in range(len(job.pods))]
    status = job_builders.a_status(slots=slots)
    return is_one_pod_now(replace(job, job=replace(job.job, status=status)))


DISASTERS: dict[str, Callable[[Observed], Observed]] = {
    "all pods vanish": vanishes,
    "all pods have vanished": moves_all_slots,
    "all pods are deleted": all_pods_are(deleting_until=NOW + 30),
    "all pods are evicted": all_pods_are(phase="Failed", reason="Evicted", running_since=None),
    "all nodes vanish": lambda job: replace(job, nodes={}),
    "all nodes are gone": all_nodes_are(NodeState.GONE),
    "all nodes are to be left": all_nodes_are(NodeState.LEAVING),
    "one pod is enough": is_one_pod_now,
    "one pod is enough, and no save is committed": has_waited_too_long_for_commits,
}


@pytest.mark.parametrize("change", DISASTERS.values(), ids=DISASTERS)
def test_what_happens_to_all_pods_costs_as_much_as_there_are_pods_and_no_more(change: Any) -> None:
    """A pass of many seconds costs the operator its Lease, and its successor makes the same pass."""
    few, many = change(a_large_job(100)), change(a_large_job(400))
    small, large = count(lambda: plan(few, NOW)), count(lambda: plan(many, NOW))
    print(f"{small} bytecodes with 100 pods, {large} with 400")
    assert large < small * 4 * SLACK


def test_the_first_pods_of_a_unit_name_no_more_mates_the_larger_it_is() -> None:
    def a_new_unit(pods: int) -> Observed:
        spec = job_builders.a_spec(replicas=pods, parallelism={"shard": pods})
        return Observed(job=job_builders.a_job(spec))

    small, large = (count(lambda n=n: plan(a_new_unit(n), NOW)) for n in (SMALL, LARGE))
    assert large < small * LARGE / SMALL * SLACK
