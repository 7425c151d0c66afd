"""What a list corrects, and when the operator requests one."""

import asyncio
from typing import cast

import pytest

from everstep_operator import kube, listing
from everstep_operator.handlers import Watchers
from everstep_operator.kube import Kube
from everstep_operator.scheduler import Scheduler
from everstep_operator.world import World
from toy_cluster import ToyCluster, a_node_object


async def _no_pass(key: tuple[str, str]) -> None:
    return None


async def test_after_a_watch_has_begun_anew_what_was_deleted_meanwhile_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "SETTLE_SECONDS", 0.0)
    cluster, world = ToyCluster(), World()
    watchers = Watchers(world, Scheduler(_no_pass), lambda: None, lambda quarantine: None)
    kept, lost = (cluster.add(kube.NODES, a_node_object(n)) for n in ("kept", "lost"))
    for node in (kept, lost):
        watchers.see_node({"type": "ADDED", "object": node})
    cluster.remove(kube.NODES, "lost")
    cluster.change_node("kept", {"metadata": {"labels": {"a": "b"}}})
    resyncing = asyncio.create_task(
        listing.resync_forever(cast(Kube, cluster), world, watchers, seconds=10_000)
    )
    watchers.see_node({"type": "MODIFIED", "object": cluster.node("kept")})
    await asyncio.sleep(0)
    assert world.nodes.get("lost") is not None, "an ordinary event must not cause a list"
    watchers.see_node({"type": None, "object": cluster.node("kept")})
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.nodes.get("lost") is None
    resyncing.cancel()
    await asyncio.gather(resyncing, return_exceptions=True)


async def test_a_list_that_fails_after_a_watch_has_begun_anew_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An API server that has just been restarted refuses some requests."""
    monkeypatch.setattr(listing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(listing, "RETRY_SECONDS", 0.0)
    cluster, world, answered = ToyCluster(refuses_lists=True), World(), asyncio.Event()
    watchers = Watchers(world, Scheduler(_no_pass), lambda: None, lambda quarantine: None)
    monkeypatch.setattr(Watchers, "wake_all", lambda _: answered.set())
    world.quarantines.put({"metadata": {"name": "lost", "uid": "u", "resourceVersion": "0"}})
    watchers.listed.set()
    resyncing = listing.resync_forever(cast(Kube, cluster), world, watchers, seconds=10_000)
    task = asyncio.create_task(resyncing)
    for _ in range(20):
        await asyncio.sleep(0)
    cluster.refuses_lists = False
    async with asyncio.timeout(5):
        await answered.wait()
    assert world.quarantines.get("lost") is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_job_that_changed_without_an_event_is_looked_at_after_the_next_list() -> None:
    """A suspended job waits only for a change of its spec."""
    cluster, world, looked = ToyCluster(), World(), asyncio.Event()

    async def look(key: tuple[str, str]) -> None:
        found = world.jobs.get("lm", "team")
        if found is not None and not found["spec"]["suspend"]:
            looked.set()

    scheduler = Scheduler(look)
    watchers = Watchers(world, scheduler, lambda: None, lambda quarantine: None)
    metadata = {"name": "lm", "namespace": "team", "uid": "u"}
    world.jobs.put({"metadata": {**metadata, "resourceVersion": "0"}, "spec": {"suspend": True}})
    cluster.add(kube.JOBS, {"metadata": dict(metadata), "spec": {"suspend": False}})
    resyncing = listing.resync_forever(cast(Kube, cluster), world, watchers, seconds=0.0)
    tasks = [asyncio.create_task(resyncing), asyncio.create_task(scheduler.run())]
    async with asyncio.timeout(10):
        await looked.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
