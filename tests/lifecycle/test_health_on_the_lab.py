"""Faults come in pairs, recur, or come while the operator is down."""

import asyncio
from pathlib import Path

import pytest

from everstep_demo.trial import Trial
from everstep_lab.api import ApiError
from everstep_operator.fleet.observed import Policy
from lifecycle.scene import LIMIT, Scene, until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]
CRD = Path(__file__).parents[2] / "crds" / "nodequarantines.yaml"


async def states(scene: Scene) -> dict[str, str]:
    return {
        q["spec"]["nodeName"]: (q.get("status") or {}).get("state", "")
        for q in await scene.board.quarantines()
    }


async def cordoned(scene: Scene) -> set[str]:
    return {name for name, node in (await scene.board.nodes()).items() if node.cordoned}


async def until_left(scene: Scene, trial: Trial, *nodes: str) -> None:
    async def left() -> bool:
        used = [await scene.board.current_pod(trial.name, s) for s in (0, 1)]
        return all(p is not None and p.node and p.node not in nodes for p in used)

    await trial.until(f"no current pod on {', '.join(nodes)}", left, limit=LIMIT)


async def test_two_bad_nodes_and_a_budget_of_one_the_job_leaves_one(scene: Scene) -> None:
    trial = await scene.start("two-bad")
    epoch = await scene.stepping(trial)
    bad = [await scene.node_of(trial, slot) for slot in (0, 1)]
    for node in bad:
        scene.lab.fault(node, gpu=0, xid=64)
    await until("one of them marked", lambda: _any_marked(scene))
    (left,) = await cordoned(scene)
    (kept,) = set(bad) - {left}
    await until_left(scene, trial, left)
    await trial.until_recovered(epoch, limit=LIMIT)
    assert await states(scene) == {left: "Quarantined", kept: "OverBudget"}
    used = [await scene.node_of(trial, slot) for slot in (0, 1)]
    assert kept in used
    assert await cordoned(scene) == {left}
    assert await trial.steps_lost() == 0


async def _any_marked(scene: Scene) -> bool:
    return bool(await cordoned(scene))


async def test_a_released_node_stays_released_although_its_xid_is_still_latched(
    scene: Scene,
) -> None:
    scene.lab.fault("node-2", gpu=0, xid=64)
    await until("node-2 marked", lambda: _is_marked(scene, "node-2"))
    for quarantine in await scene.board.quarantines():
        await scene.board.release(quarantine["metadata"]["name"])

    async def free() -> bool:
        return not await cordoned(scene)

    await until("node-2 released", free)
    await asyncio.sleep(5.0)  # five scrapes that show the same XID
    assert await cordoned(scene) == set()
    assert await scene.board.quarantines() == []


async def _is_marked(scene: Scene, node: str) -> bool:
    return node in await cordoned(scene)


async def test_all_quarantines_deleted_at_once_release_all_their_nodes(scene: Scene) -> None:
    """There are more quarantines than may vanish without an event. But each deletion has its watch event,
    and the CRD was not created again.
    """
    nodes = sorted(await scene.board.nodes())
    assert len(nodes) > Policy().many_lost
    for node in nodes:
        scene.lab.fault(node, gpu=0, xid=64)

    async def all_found() -> bool:
        return sorted(await states(scene)) == nodes and bool(await cordoned(scene))

    await until("a quarantine for each node", all_found)
    scene.lab.kubectl("delete", "nodequarantines", "--all")

    async def free() -> bool:
        return not await cordoned(scene) and not await scene.board.quarantines()

    await until("all released", free)
    await asyncio.sleep(5.0)  # five scrapes that show the same XIDs
    assert (await cordoned(scene), await states(scene)) == (set(), {})


async def test_a_fault_that_came_while_the_operator_was_down_is_found_and_left(
    scene: Scene,
) -> None:
    trial = await scene.start("unwatched")
    epoch = await scene.stepping(trial)
    node = await scene.node_of(trial, 0)
    scene.lab.operator_kill()
    try:
        scene.lab.fault(node, gpu=0, xid=64)
        await asyncio.sleep(3.0)
    finally:
        await asyncio.to_thread(_start_operator, scene)
    await until(f"{node} marked", lambda: _is_marked(scene, node))
    await until_left(scene, trial, node)
    await trial.until_recovered(epoch, limit=LIMIT)
    assert await trial.steps_lost() == 0


def _start_operator(scene: Scene) -> None:
    scene.lab.operator_start()


async def test_all_exporters_rolled_at_once_take_no_node_and_move_nobody(scene: Scene) -> None:
    trial = await scene.start("rolled")
    epoch = await scene.stepping(trial)
    for node in await scene.board.nodes():
        scene.lab.fault(node, exporter="silent")
    await asyncio.sleep(10.0)
    assert await cordoned(scene) == set()
    for node in await scene.board.nodes():
        scene.lab.heal(node)
    await scene.further(trial)
    await trial.watch.refresh()
    assert (trial.watch.epoch, await states(scene)) == (epoch, {})


async def test_marks_of_others_stay_and_ours_come_back(scene: Scene) -> None:
    foreign = {"key": "example.com/theirs", "effect": "NoSchedule", "value": "x"}
    await scene.api.patch("/api/v1/nodes/node-3", {"spec": {"taints": [foreign]}})
    scene.lab.fault("node-3", gpu=0, xid=64)
    await until("node-3 marked", lambda: _is_marked(scene, "node-3"))
    keys = {t["key"] for t in (await scene.node("node-3"))["spec"]["taints"]}
    assert keys >= {"example.com/theirs", "everstep.dev/quarantine"}
    await scene.cordon("node-3", on=False)
    await until("node-3 marked again", lambda: _is_marked(scene, "node-3"))
    for quarantine in await scene.board.quarantines():
        await scene.board.release(quarantine["metadata"]["name"])

    async def freed() -> bool:
        return not await cordoned(scene)

    await until("node-3 released", freed)
    left = {t["key"] for t in (await scene.node("node-3"))["spec"].get("taints", [])}
    assert "example.com/theirs" in left
    assert "everstep.dev/quarantine" not in left
    await scene.api.patch("/api/v1/nodes/node-3", {"spec": {"taints": None}})


async def test_the_crd_deleted_under_us_releases_no_node(scene: Scene) -> None:
    scene.lab.fault("node-4", gpu=0, xid=64)
    await until("node-4 marked", lambda: _is_marked(scene, "node-4"))
    try:
        scene.lab.kubectl("delete", "crd", "nodequarantines.everstep.dev", timeout=120)
        await asyncio.sleep(8.0)
        assert await scene.is_cordoned("node-4"), "deleting the CRD must release no node"
    finally:
        scene.lab.kubectl("apply", "-f", str(CRD))
        scene.lab.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    # If a watched kind is gone, the operator's process ends. In a cluster the kubelet restarts it.
    if scene.lab.status()["operator"]["pid"] is None:
        await asyncio.to_thread(scene.lab.operator_start)

    async def back() -> bool:
        try:
            return "node-4" in await states(scene)
        except ApiError as error:
            if error.status != 404:
                raise
            return False  # the kind is not served yet

    await until("the record of node-4 is back", back)
    assert await scene.is_cordoned("node-4")
