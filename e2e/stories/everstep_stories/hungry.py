"""A job whose script exceeds its containers' memory limit, and what must be true afterwards."""

import json

from everstep_agent import logline
from everstep_demo.board import Object, Pod
from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.jobs import BATCH, SCRIPTS_PATH
from everstep_stories.scene import Scene

STEPS, HUNGRY, SAVED = 120, 31, 30
"""The job's last step; the step in which memory runs out; the newest saved step before that."""
OUT_OF_MEMORY, SIGKILLED = "OOMKilled", 137
Line = tuple[str, dict[str, str]]


async def run(
    scene: Scene, name: str, slots: tuple[int, ...]
) -> tuple[Trial, dict[int, list[Line]]]:
    """Run the job to its end. The containers of these slots run out of memory once, and restart in
    the same pods.

    Return the job, and the log lines of each slot's last container.
    """
    if not scene.system.by_helm:
        raise NotHereError("the local lab simulates no memory limits; the kind lab has real ones")
    trial = await scene.start(_build_job(scene, name, slots))
    await trial.until_stepping(limit=120)
    before = [p.name for p in await scene.board.pods(name)]

    async def restarted() -> bool:
        return await trial.restarted_containers() == len(slots)

    with scene.timed("steps → containers restarted"):
        await trial.until("the restarts", restarted, limit=60)
    with scene.timed("restarted → Complete"):
        await trial.until_condition("Complete", limit=120)
    pods = await scene.board.pods(name)
    assert [p.name for p in pods] == before, "the pods are the same"
    return trial, {pod.slot: await _list_lines(scene, pod) for pod in pods}


async def run_rank(scene: Scene, name: str, slot: int) -> Trial:
    """Run the job to its end. The kernel kills the rank of this slot once, and no other process of
    its container.
    """
    if not scene.system.by_helm:
        raise NotHereError("the local lab simulates no memory limits; the kind lab has real ones")
    trial = await scene.start(_build_job(scene, name, (slot,), whole=False))
    await trial.until_stepping(limit=120)
    pod = await scene.board.current_pod(name, slot)
    assert pod is not None
    if not await _ends_ranks_alone(scene, pod.node):
        raise NotHereError("the kubelet has the kernel end whole containers (singleProcessOOMKill)")
    with scene.timed("steps → Complete"):
        await trial.until_condition("Complete", limit=180)
    return trial


async def _ends_ranks_alone(scene: Scene, node: str) -> bool:
    text = await scene.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/configz")
    return bool(json.loads(text)["kubeletconfig"].get("singleProcessOOMKill", True))


async def check(
    scene: Scene, trial: Trial, lines: dict[int, list[Line]], slots: tuple[int, ...]
) -> None:
    """Check that the cause is named, that the pods adopted their saves and fetched nothing from the
    store, and that no step is lost.
    """
    for slot in slots:
        await _check_end(scene, f"{trial.name}-{slot}-1")
        (ready,) = [fields for event, fields in lines[slot] if event == "agent_ready"]
        assert ready["incarnation"] == "2"
        assert str(SAVED) in ready["adopted"].split(","), ready
    fetched = [fields for each in lines.values() for event, fields in each if event == "fetched"]
    assert not [f for f in fetched if "store" in f], fetched
    told = [
        e["message"] for e in await scene.board.events(trial.name) if e["reason"] == OUT_OF_MEMORY
    ]
    assert all(any(f"{trial.name}-{slot}-1" in m for m in told) for slot in slots), told
    assert await scene.board.quarantines() == []
    (incident,) = await trial.incidents()
    scene.recorder.say("incident", f"{incident['cause']}: {incident['message']}")
    scene.recorder.outcome.steps_lost = await trial.steps_lost()
    assert scene.recorder.outcome.steps_lost == 0
    assert (await scene.check_samples(trial)).steps == STEPS
    assert f"steps 1 to {STEPS} once each, {STEPS * BATCH} samples" in await scene.verify(trial)


async def _check_end(scene: Scene, pod: str) -> None:
    body = json.loads(await scene.kubectl("get", "pod", pod, "-o", "json"))
    (container,) = body["status"]["containerStatuses"]
    ended = container["lastState"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == (OUT_OF_MEMORY, SIGKILLED), ended


async def _list_lines(scene: Scene, pod: Pod) -> list[Line]:
    text = await scene.board.logs(pod.name)
    found = (logline.parse_line(line) for line in text.splitlines())
    return [line for line in found if line is not None]


def _build_job(scene: Scene, name: str, slots: tuple[int, ...], *, whole: bool = True) -> Object:
    """`whole`: the kernel kills all processes of a container, not only one."""
    env = {
        "HUNGRY_UNTIL": str(STEPS),
        "HUNGRY_STEP": str(HUNGRY),
        "HUNGRY_SLOTS": ",".join(map(str, slots)),
        "HUNGRY_WHOLE": str(int(whole)),
    }
    job = scene.build_job(name, env=env)
    job["spec"]["checkpoint"] |= {"everySteps": 10, "stagingMemory": "128Mi"}
    pod = job["spec"]["workers"]["template"]["spec"]
    (container,) = pod["containers"]
    container["command"] = ["everstep", "run", f"{SCRIPTS_PATH}/hungry.py"]
    # Requests that equal the limits (QoS Guaranteed): only then can the script choose which process
    # the kernel kills.
    amounts = {"cpu": "1", "memory": "1Gi"}
    container["resources"] = {"requests": amounts, "limits": {**amounts, "nvidia.com/gpu": 1}}
    container["volumeMounts"] += [{"name": "scratch", "mountPath": "/scratch"}]
    pod["volumes"] += [{"name": "scratch", "emptyDir": {}}]
    return job
