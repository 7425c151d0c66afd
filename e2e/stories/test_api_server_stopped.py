"""The API server is down for a minute: steps and commits continue, and afterwards status is correct again."""

import asyncio
import contextlib
import time

import pytest

from everstep_demo.trial import Trial
from everstep_stories.clusters import NotHereError
from everstep_stories.scene import Scene

pytestmark = pytest.mark.timeout(600)
AWAY_SECONDS = 60.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


async def test_training_needs_no_api_server(scene: Scene, survivor: Trial) -> None:
    stop = getattr(scene.cluster, "api_server_stop", None)
    if stop is None:
        raise NotHereError("this cluster's API server cannot be stopped from here")
    epoch = await survivor.until_stepping()
    pods = await scene.board.pods(survivor.name)
    await survivor.watch.refresh()
    committed = survivor.watch.committed
    began = time.monotonic()
    await asyncio.to_thread(stop)
    try:
        while time.monotonic() - began < AWAY_SECONDS:
            await asyncio.sleep(2.0)
            await survivor.watch.refresh()
    finally:
        await asyncio.to_thread(scene.cluster.api_server_start)  # type: ignore[attr-defined]
    steps = survivor.watch.committed - committed
    scene.recorder.say(
        "API server away", f"{AWAY_SECONDS:.0f} s; {steps} steps committed during it"
    )
    assert steps > 0
    with scene.timed("API server back → status is current"):
        await scene.until_further(survivor, 20, limit=90)
    assert await survivor.until_stepping() == epoch
    assert await scene.board.pods(survivor.name) == pods
    assert not [n for n in (await scene.board.nodes()).values() if n.cordoned]
    scene.recorder.outcome.steps_lost = 0
    await scene.check_samples(survivor)
    for component in ("kube-scheduler", "kube-controller-manager"):
        with scene.timed(f"API server back → {component} leads again"):
            await until_it_leads_again(scene, component)


async def until_it_leads_again(scene: Scene, component: str, limit: float = 200.0) -> None:
    """Wait until the component renews its Lease, because later stories need it.

    It exits when it loses its Lease, and is restarted with a back-off.
    """
    renewed: set[str] = set()
    async with asyncio.timeout(limit), contextlib.aclosing(
        scene.api.follow(LEASES, fieldSelector=f"metadata.name={component}")
    ) as events:  # fmt: skip
        async for event in events:
            leases = event.object["items"] if event.type == "LISTED" else [event.object]
            renewed |= {lease["spec"]["renewTime"] for lease in leases}
            if len(renewed) > 1:
                return
