"""Jobs whose nodes lose power, one pod on each node at first, and what must be true afterwards."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

from everstep_contract import names
from everstep_demo.board import Object, Pod, condition
from everstep_demo.story import FIRST_STEP, Incident
from everstep_demo.trial import POLL_SECONDS, Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene
from everstep_stories.system import NAMESPACE

NODES = 4
REPLACE_SECONDS = 10
NEVER = 3600
"""A nodeLostSeconds that outlasts the story, so that only the yield can end the wait."""
WITHIN_SECONDS = 60.0
"""Limit for the time from the fault to the first new step. If the machine does no other work, 20 s
are enough, and 5 s with a spare; the table at the end shows the figures.
"""
STEPS_BEFORE = 60
"""Enough to learn how long a step takes."""


def build_job(scene: Scene, name: str, *, replicas: int, spares: int = 0) -> Object:
    """A job whose pods are on different nodes, as long as there are enough nodes."""
    recovery = {"nodeLostSeconds": NEVER, "replaceAfterSeconds": REPLACE_SECONDS}
    job = scene.build_job(name, replicas=replicas, spec={"recovery": recovery})
    workers = job["spec"]["workers"]
    workers |= {"minReplicas": 1, **({"spares": spares} if spares else {})}
    spread = workers["template"]["spec"]["topologySpreadConstraints"][0]
    spread |= {"whenUnsatisfiable": "DoNotSchedule", "nodeTaintsPolicy": "Honor"}
    return job


async def start(scene: Scene, job: Object) -> Trial:
    """Start the job on a cluster with NODES free nodes; return once it has its full size and takes
    steps.
    """
    await _clear(scene)
    trial = await scene.start(job)
    await trial.until_stepping(limit=180)
    workers = job["spec"]["workers"]
    await until_size(trial, int(workers["replicas"]), int(workers.get("spares", 0)))
    await scene.until_further(trial, STEPS_BEFORE)
    return trial


async def until_size(trial: Trial, size: int, spares: int = 0, *, limit: float = 120.0) -> None:
    """Wait until the status shows `size` members, at least `spares` spares and no open incident."""

    async def is_so() -> bool:
        status = (await trial.job())["status"]
        ready = (status.get("spares") or {}).get("ready", 0)
        whole = (status.get("world") or {}).get("summary") == f"{size}/{size}"
        over = not any(i.get("open") for i in status.get("incidents") or [])
        return whole and over and ready >= spares and status["state"] == "Running"

    await trial.until(f"{size} members and {spares} spares", is_so, limit=limit)


@contextlib.asynccontextmanager
async def hearing(trial: Trial) -> AsyncIterator[dict[str, str]]:
    """Collect what the condition Running says within this context: reason → its last message."""
    said: dict[str, str] = {}
    listener = asyncio.create_task(_listen(trial, said))
    try:
        yield said
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


def told_of_silence(said: Mapping[str, str]) -> str:
    """What the job waited for, from the messages that `hearing` collected; empty: it reported
    nothing.
    """
    return said.get("NodeSilent") or said.get("NodeNotReady") or ""


async def _listen(trial: Trial, said: dict[str, str]) -> None:
    while True:
        found = condition(await trial.job(), "Running")
        if found is not None:
            said[found["reason"]] = found["message"]
        await asyncio.sleep(POLL_SECONDS)


async def find_pod(scene: Scene, trial: Trial, slot: int) -> Pod:
    pod = await scene.board.current_pod(trial.name, slot)
    assert pod is not None, f"slot {slot} of {trial.name} has no pod"
    return pod


async def lose(scene: Scene, trial: Trial, lost: Sequence[Pod]) -> Incident:
    """Cut the power of these pods' nodes; return once as many workers as before take steps again.

    Check that no other worker was restarted, that each lost node is named once, that no step is
    lost, and that no other node is cordoned.
    """
    await _keep_leader_off(scene, {pod.node for pod in lost})
    before = await trial.members()

    async def kill(_: Pod) -> None:
        began = time.monotonic()
        await asyncio.gather(*(scene.break_node(pod.node, kill_node=True) for pod in lost))
        scene.recorder.phase("power cut", time.monotonic() - began)

    nodes = " and ".join(f"{pod.node} (slot {pod.slot})" for pod in lost)
    seen = await scene.play(trial, f"{nodes} without power", kill, slot=lost[0].slot)
    assert seen.reached[FIRST_STEP] < WITHIN_SECONDS
    assert seen.moved_to not in {pod.node for pod in lost}
    await until_size(trial, len(before))
    after = await trial.members()
    slots = {pod.slot for pod in lost}
    others = {slot: member for slot, member in before.items() if slot not in slots}
    assert others == {slot: after.get(slot) for slot in others}, "nobody else restarts"
    await _check_losses(scene, trial, lost)
    await scene.check_samples(trial)
    return seen


async def _keep_leader_off(scene: Scene, nodes: Collection[str]) -> None:
    """Move the operator's leader to another node: another story tests the operator's failover."""
    if not scene.system.by_helm:
        return
    leader, _ = await scene.system.until_leader()
    while _home_of(scene, leader) in nodes:
        await asyncio.to_thread(
            scene.cluster.kubectl, "delete", "pod", leader, "-n", NAMESPACE, "--wait=false"
        )
        leader, _ = await scene.system.until_leader(other_than=leader)


def _home_of(scene: Scene, pod: str) -> str:
    homes = {p["metadata"]["name"]: p["spec"].get("nodeName") for p in scene.system.pods()}
    return str(homes.get(pod))


async def _check_losses(scene: Scene, trial: Trial, lost: Collection[Pod]) -> None:
    expected = sorted(("NodeLost", pod.node, pod.slot) for pod in lost)

    async def is_told() -> bool:
        return _causes(await trial.incidents()) == expected

    try:
        await trial.until("each lost node named", is_told, limit=60)
    finally:
        scene.recorder.say("told", str(_causes(await trial.incidents())))
    assert scene.recorder.outcome.steps_lost == await trial.steps_lost() == 0
    restarts = (await trial.job())["status"]["restarts"]
    assert restarts["byCause"] == {"NodeLost": len(lost)}, restarts
    cordoned = {name for name, node in (await scene.board.nodes()).items() if node.cordoned}
    assert cordoned <= {pod.node for pod in lost}


def _causes(incidents: Sequence[Object]) -> list[tuple[str, str, int]]:
    return sorted((i["cause"], i.get("node") or "", int(i.get("slot", -1))) for i in incidents)


async def _clear(scene: Scene) -> None:
    if len((await asyncio.to_thread(scene.cluster.status))["nodes"]) < NODES:
        raise NotHereError(
            f"the story needs {NODES} nodes with GPUs; the kind lab has them after "
            f"`everstep-lab up --kind --no-operator --nodes {NODES}`"
        )
    await scene.kubectl("delete", "rtj", "--all")
    await until(f"{NODES} free nodes", lambda: _is_clear(scene), limit=180)


async def _is_clear(scene: Scene) -> bool:
    pods = await scene.api.list(
        f"/api/v1/namespaces/{scene.namespace}/pods", labelSelector=names.LABEL_JOB
    )
    ready = {name for name, node in (await scene.board.nodes()).items() if node.ready}
    nodes = await scene.api.list("/api/v1/nodes")
    free = [n for n in nodes if _offers_gpus(n) and not n["spec"].get("taints")]
    return not pods and len(ready & {n["metadata"]["name"] for n in free}) >= NODES


def _offers_gpus(node: Object) -> bool:
    return int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) > 0


async def until(what: str, is_so: Callable[[], Awaitable[object]], *, limit: float) -> None:
    try:
        async with asyncio.timeout(limit):
            while not await is_so():
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"waited {limit:.0f} s for: {what}") from None
