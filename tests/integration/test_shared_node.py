"""Two slots run on one node, and one of its GPUs falls off the bus.

So at the same time, one pod has lost its state, and the other must save and leave.
"""

import pytest

from everstep_demo import faults
from everstep_demo.board import Board
from everstep_demo.runwatch import RunWatch
from everstep_demo.trial import NAMESPACE, URI, Trial, build_job
from everstep_lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


def build_crowded_job(name: str, node: str) -> dict:
    """Build a job whose pods prefer that node but may run elsewhere."""
    job = build_job(name, env={"TINY_STEPS": "100000"})
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    near = {"weight": 100, "preference": {"matchExpressions": [here]}}
    template = job["spec"]["workers"]["template"]
    del template["spec"]["topologySpreadConstraints"]
    template["spec"]["affinity"] = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}
    }
    return job


async def find_free_node(lab: Lab, board: Board) -> str:
    marked = {name for name, node in (await board.nodes()).items() if node.cordoned}
    nodes = lab.status()["nodes"]
    return next(
        n for n, d in nodes.items() if n not in marked and not any(g["pod"] for g in d["gpus"])
    )


async def test_of_two_slots_on_the_bad_node_the_living_one_saves_and_both_move(
    lab: Lab, board: Board
) -> None:
    name, slot = "crowded", 0
    trial = Trial(name, board, RunWatch(URI, f"{NAMESPACE}/{name}", lab.store_environment))
    node = await find_free_node(lab, board)
    await board.create(build_crowded_job(name, node))
    try:
        await trial.until_stepping(limit=180)
        pods = [await board.current_pod(name, s) for s in (0, 1)]
        hurt, other = pods[slot], pods[1 - slot]
        assert hurt is not None
        assert other is not None
        assert hurt.node == other.node
        faults.break_gpu(lab, hurt, 79, NAMESPACE)
        await trial.until_replaced(hurt)
        await trial.until_replaced(other)
        assert await trial.steps_lost() == 0
        nodes = await trial.nodes()
        assert nodes
        assert hurt.node not in nodes
    finally:
        await board.delete(name)
        for quarantine in await board.quarantines():
            await board.release(quarantine["metadata"]["name"])
        lab.heal(node)
