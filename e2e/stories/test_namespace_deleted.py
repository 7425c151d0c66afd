"""The namespace of a running job is deleted: no finalizer delays the deletion."""

import asyncio

import pytest

from everstep_demo.board import Board
from everstep_stories.jobs import Workplace
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(300)
NAMESPACE = "shortlived"


async def test_a_namespace_with_a_running_job_can_be_deleted(scene: Scene) -> None:
    place = Workplace(scene.cluster, NAMESPACE)
    place.make()
    inner = Scene(scene.cluster, scene.system, scene.api, NAMESPACE, scene.recorder)
    trial = await inner.start(scene.build_job("doomed"))
    await trial.until_stepping(limit=120)
    job = await Board(scene.api, NAMESPACE).job("doomed")
    assert not job["metadata"].get("finalizers")
    with scene.timed("namespace deleted"):
        await asyncio.to_thread(place.delete)
    left = await asyncio.to_thread(
        scene.cluster.kubectl, "get", "namespace", NAMESPACE, check=False
    )
    assert "NotFound" in left or "not found" in left
