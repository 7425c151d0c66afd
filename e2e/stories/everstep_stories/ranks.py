"""The process of a rank, in its pod."""

import re

from everstep_demo.board import Pod
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene


async def find_rank(scene: Scene, pod: Pod) -> str:
    """The pid of the rank that trains in the pod, as seen in its container."""
    if not scene.system.by_helm:
        raise NotHereError("`kubectl exec` is not simulated by the local lab")
    said = await scene.kubectl("logs", pod.name)
    found = re.findall(r"event=worker_runs .*\bpid=(\d+)", said)
    assert found, f"{pod.name} does not tell its worker's pid"
    return str(found[-1])
