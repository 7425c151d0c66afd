"""What an event costs the operator with large jobs, many jobs and many nodes.

Calls the operator's code on plain values, without cluster or network. Times are CPU milliseconds,
the minimum of several tries.
"""

import csv
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from everstep_contract import levels, names
from everstep_operator import model
from everstep_operator.handlers import VerdictBoard, Watchers
from everstep_operator.jobs import genuine, observe, patch_body, statuspatch
from everstep_operator.jobs.actions import CreatePod
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.observed import Job, NodeFact, Observed, Pod
from everstep_operator.jobs.passes import Passes
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.rivals import Rivals
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.kube import Kube
from everstep_operator.model_status import JobStatus, SlotStatus
from everstep_operator.scheduler import Scheduler
from everstep_operator.values import NodeState, NodeVerdict
from everstep_operator.world import Object, World

BEFORE = Path(__file__).parent.parent / "before_operator.csv"
NOW = 1_000_000.0
HOUR = 3600.0
UID = "5f1c7d2e-0000-4000-8000-000000000001"
PODS = (100, 2_000)
JOBS = (100, 1_000)
NODES = (100, 1_000)
LEAST_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    unit: str
    size: int
    value: float


def measure() -> list[Figure]:
    found: list[Figure] = []
    for size in PODS:
        found += measure_large_job(size)
    for size in JOBS:
        found += measure_waiting_jobs(size)
    for size in NODES:
        found += measure_nodes(size)
    return found


def measure_large_job(pods: int) -> list[Figure]:
    observed = build_running(pods)
    old = statuspatch.to_document(plan(observed, NOW).status)
    slots = list(old["slots"])
    slots[-1] = {**slots[-1], "attempt": 2, "cause": "NodeLost"}
    patch = statuspatch.build_patch(old, {**old, "slots": slots})
    body = patch_body.build_bodies("123456789", old, patch)[0]
    return [
        Figure(name="plan, by pods of the job", unit="ms", size=pods, value=best(lambda: plan(observed, NOW))),
        Figure(name="status write, one slot of so many", unit="bytes", size=pods, value=len(json.dumps(body))),
    ]  # fmt: skip


def measure_waiting_jobs(jobs: int) -> list[Figure]:
    """Passes per hour of jobs that wait for nodes (computed from a plan's pause), and the cost of
    one look for rivals.
    """
    pause = plan(build_unplaced(), NOW).wake_after
    hourly = 0.0 if pause is None else jobs * HOUR / pause
    world, mine = build_half_placed(jobs)
    rivals = Rivals(world, lambda job: find_pods(world, job), lambda key: None)
    rivals.refresh()
    versions = itertools.count(2)

    def look() -> None:
        metadata = {**mine["metadata"], "resourceVersion": str(next(versions))}
        world.jobs.put({**mine, "metadata": metadata})
        rivals.refresh()
        rivals.find_younger(mine)

    return [
        Figure(name="passes of jobs without nodes", unit="an hour", size=jobs, value=hourly),
        Figure(name="look for rivals, by half-placed jobs", unit="ms", size=jobs, value=best(look)),
    ]


def measure_nodes(nodes: int) -> list[Figure]:
    world = build_nodes(nodes)
    passes = build_passes(world)
    board = VerdictBoard(passes, lambda key: None)
    board.publish({}, {})
    verdict = {"node-3": build_verdict("node-3")}
    turn = itertools.count()
    scheduler, named = Scheduler(passes.run), count_named(nodes)
    watchers = Watchers(world, scheduler, lambda: None, lambda quarantine: None)

    def flip() -> None:
        number = next(turn)
        node = build_node("node-3", version=number + 2, ready="False" if number % 2 else "True")
        watchers.see_node({"type": "MODIFIED", "object": node})

    def publish() -> None:
        board.publish({} if next(turn) % 2 else verdict, {})

    return [
        Figure(name="a node's readiness changes, by nodes and pods", unit="ms", size=nodes, value=best(flip)),
        Figure(name="a verdict changes, by nodes and pods", unit="ms", size=nodes, value=best(publish)),
        Figure(name="nodes that a new pod names, by nodes at fault", unit="fields", size=nodes, value=named),
        Figure(name="remembered of nodes that have gone", unit="entries", size=nodes, value=count_remembered(nodes)),
    ]  # fmt: skip


def count_named(nodes: int) -> int:
    verdicts = {f"node-{n}": build_verdict(f"node-{n}") for n in range(nodes)}
    observed = replace(build_unplaced(), pods=(), verdicts=verdicts, template_checked=True)
    status = JobStatus(slots=[SlotStatus(slot=0, attempt=1)])
    observed = replace(observed, job=replace(observed.job, status=status))
    bodies = [a.body for a in plan(observed, NOW).actions if isinstance(a, CreatePod)]
    return json.dumps(bodies[0]["spec"]).count('"NotIn"')


def count_remembered(nodes: int) -> int:
    """How many nodes the operator remembers after all of them were not Ready and then deleted."""
    world = build_nodes(nodes)
    passes = build_passes(world)
    for n in range(nodes):
        world.nodes.put(build_node(f"node-{n}", version=2, ready="False"))
    pods = build_running(nodes).pods
    passes._nodes(pods, NOW)
    for node in list(world.nodes):
        world.nodes.drop(node)
    passes._nodes(pods, NOW)
    return len(passes._not_ready)


def best(call: Callable[[], object], tries: int = 5) -> float:
    """CPU milliseconds of one call: the minimum of several tries.

    Each try is long enough for the CPU clock.
    """
    calls = 1
    while (spent := _spend(call, calls)) < LEAST_SECONDS:
        calls *= 4
    return min(spent, *(_spend(call, calls) for _ in range(tries - 1))) / calls * 1000


def _spend(call: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        call()
    return time.process_time() - began


# --- input of the measurements


def build_spec(replicas: int) -> dict[str, Any]:
    container = {"name": "trainer", "image": "i", "command": ["everstep", "run", "t.py"]}
    template = {"spec": {"containers": [container]}}
    return {
        "workers": {"replicas": replicas, "template": template},
        "checkpoint": {"uri": "s3://bucket/folder", "everySteps": 25},
    }


def build_job(replicas: int, status: JobStatus) -> Job:
    spec = build_spec(replicas)
    return Job(
        namespace="team", name="lm", uid=UID, generation=1, resource_version="7",
        created_at=NOW - 60, deleting=False, spec=model.parse_spec(spec),
        raw_template=spec["workers"]["template"], status=status,
    )  # fmt: skip


def build_running(pods: int) -> Observed:
    slots = [
        SlotStatus(slot=s, attempt=1, pod_uid=f"uid-{s}", node=f"node-{s}") for s in range(pods)
    ]
    members = tuple(
        levels.Member(slot=s, attempt=1, incarnation=1, rank=s, life=1, step=5) for s in range(pods)
    )
    return Observed(
        job=build_job(pods, JobStatus(slots=slots, epoch=1, step=5)),
        pods=tuple(build_pod(s, f"node-{s}") for s in range(pods)),
        seen=levels.Seen(generation=1, epoch=1, running=True, members=members, step=5),
        callers=frozenset(f"uid-{s}" for s in range(pods)),
        nodes={f"node-{s}": NodeFact(name=f"node-{s}") for s in range(pods)},
        template_checked=True,
    )


def build_pod(slot: int, node: str) -> Pod:
    since = NOW - 50 if node else None
    return Pod(
        name=f"lm-{slot}-1", uid=f"uid-{slot}", slot=slot, attempt=1,
        phase="Running" if node else "Pending", node=node, ip="10.0.0.1" if node else "", running_since=since,
    )  # fmt: skip


def build_unplaced() -> Observed:
    status = JobStatus(slots=[SlotStatus(slot=0, attempt=1, pod_uid="uid-0")], state="Pending")
    return Observed(job=build_job(1, status), pods=(build_pod(0, ""),), template_checked=True)


def build_verdict(node: str) -> NodeVerdict:
    return NodeVerdict(node=node, state=NodeState.LEAVING, reason="GpuFatalXid", message="m")


def build_half_placed(jobs: int) -> tuple[World, Object]:
    """Jobs that have a node for one of their two pods, and the oldest of these jobs."""
    world = World()
    for number in range(jobs):
        job = f"job-{number}"
        metadata = {
            "name": job, "namespace": "team", "uid": f"uid-{job}", "resourceVersion": "1",
            "creationTimestamp": to_stamp(NOW + number),
        }  # fmt: skip
        world.jobs.put({"metadata": metadata, "spec": {}, "status": {"state": "Pending"}})
        for slot, node in enumerate((f"node-{number}", "")):
            world.pods.put(build_pod_object(job, slot, node))
    mine = world.jobs.get("job-0", "team")
    assert mine is not None
    return world, mine


def build_pod_object(job: str, slot: int, node: str) -> dict[str, Any]:
    owner = {"kind": names.KIND, "name": job, "uid": f"uid-{job}", "controller": True}
    metadata = {
        "name": f"{job}-{slot}-1", "namespace": "team", "uid": f"pod-{job}-{slot}",
        "resourceVersion": "1", "ownerReferences": [owner],
        "labels": {names.LABEL_JOB_UID: f"uid-{job}", names.LABEL_SLOT: str(slot), names.LABEL_ATTEMPT: "1"},
    }  # fmt: skip
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Pending"}}


def find_pods(world: World, job: Object) -> tuple[Pod, ...]:
    """The job's pods, parsed, without a check that they are genuine."""
    metadata = job["metadata"]
    found = world.pods_of(metadata["namespace"], metadata["uid"])
    places = (genuine.Place(slot=n, attempt=1) for n in range(len(found)))
    return tuple(observe.to_pod(pod, place) for pod, place in zip(found, places, strict=True))


def build_passes(world: World) -> Passes:
    """Passes that need neither a cluster nor agents."""
    return Passes(
        port=cast(Kube, None), world=world, agents=cast(Agents, None), key=b"", clock=lambda: NOW,
        figures_seconds=1.0,
    )  # fmt: skip


def build_nodes(nodes: int) -> World:
    """Nodes with one pod on each, and one job for every two pods."""
    world = World()
    for n in range(nodes):
        world.nodes.put(build_node(f"node-{n}"))
        world.pods.put(build_pod_object(f"job-{n // 2}", n % 2, f"node-{n}"))
    world.ready = True
    return world


def build_node(name: str, version: int = 1, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": ready, "message": "m"}],
            "nodeInfo": {"machineID": name, "bootID": "b"},
        },
    }


# --- the table


def load_before(path: Path = BEFORE) -> Mapping[tuple[str, int], float]:
    with path.open(newline="") as file:
        return {
            (row["name"], int(row["size"])): float(row["value"]) for row in csv.DictReader(file)
        }


def render(figures: list[Figure], before: Mapping[tuple[str, int], float]) -> str:
    return "\n".join(_lines(figures, before))


def _lines(figures: list[Figure], before: Mapping[tuple[str, int], float]) -> Iterator[str]:
    yield f"{'':<46} {'size':>6} {'before':>12} {'now':>10}"
    for f in figures:
        was = before.get((f.name, f.size))
        then = "-" if was is None else _number(was)
        yield f"{f.name:<46} {f.size:>6} {then:>12} {_number(f.value):>10} {f.unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3f}"
