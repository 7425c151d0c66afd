"""In-memory state about an object is removed with the object."""

from typing import Any, cast

from everstep_contract import levels
from everstep_operator.handlers import VerdictBoard
from everstep_operator.jobs import passes
from everstep_operator.jobs.agents import Agents
from everstep_operator.kube import Kube
from everstep_operator.world import World
from job_builders import a_pod
from toy_cluster import a_node_object


def a_node(version: int, ready: str, transition: str = "") -> dict[str, Any]:
    node = a_node_object("node-0")
    node["metadata"]["resourceVersion"] = str(version)
    condition = {"type": "Ready", "status": ready, "message": "no heartbeat"}
    node["status"]["conditions"] = [{**condition, "lastTransitionTime": transition}]
    return node


def the_passes(world: World) -> passes.Passes:
    return passes.Passes(
        port=cast(Kube, None), world=world, agents=cast(Agents, None), key=b"",
        clock=lambda: 0.0, figures_seconds=1.0,
    )  # fmt: skip


def unready_for(made: passes.Passes, now: float) -> float | None:
    return made._nodes((a_pod(0),), now)["node-0"].not_ready_for


def test_a_node_that_was_ready_while_no_job_looked_is_not_ready_since_the_last_time_only() -> None:
    """Otherwise the next job on the node would at once consider it lost."""
    made = the_passes(world := World())
    world.nodes.put(a_node(1, "Unknown"))
    assert unready_for(made, 100.0) == 0.0
    assert unready_for(made, 130.0) == 30.0
    world.nodes.put(a_node(2, "True"))
    made._nodes((), 200.0)  # a pass of another job
    world.nodes.put(a_node(3, "Unknown"))
    assert unready_for(made, 1000.0) == 0.0


def test_a_node_that_was_ready_between_two_passes_is_not_ready_since_the_second_only() -> None:
    """The world keeps only the newest version of an object, so no pass sees the node Ready."""
    made = the_passes(world := World())
    world.nodes.put(a_node(1, "Unknown", "10:00:00"))
    assert unready_for(made, 100.0) == 0.0
    world.nodes.put(a_node(2, "True", "10:00:50"))
    world.nodes.put(a_node(3, "Unknown", "10:00:59"))
    assert unready_for(made, 160.0) == 0.0
    world.nodes.put(a_node(4, "Unknown", "10:00:59"))
    assert unready_for(made, 190.0) == 30.0


def test_a_node_that_is_deleted_is_forgotten() -> None:
    made = the_passes(world := World())
    world.nodes.put(a_node(1, "Unknown"))
    made._nodes((), 100.0)
    world.nodes.drop(a_node(1, "Unknown"))
    made._nodes((), 200.0)
    assert made._not_ready == {}


def test_a_judgment_wakes_only_jobs_that_wait_for_one() -> None:
    made = the_passes(World())
    woken: list[tuple[str, str]] = []
    board = VerdictBoard(made, woken.append)
    waits, trains = ("team", "waits"), ("team", "trains")
    death = levels.DeviceDeath(id="1", slot=0, attempt=1, message="ECC error")
    made._note_waiting(waits, levels.Seen(device_deaths=(death,)))
    made._note_waiting(trains, levels.Seen())
    board.publish({}, {"node-0": 1.0})
    board.publish({}, {"node-0": 1.0})
    assert woken == [waits]
    made._note_waiting(waits, levels.Seen())
    board.publish({}, {"node-0": 2.0})
    assert (woken, made.judged_at) == ([waits], {"node-0": 2.0})


def test_the_age_of_a_judgment_is_told_for_the_jobs_own_nodes() -> None:
    made = the_passes(World())
    made.steady = lambda: 50.0
    made.judged_at = {"node-0": 42.0, "node-9": 1.0}
    assert made._judged_ages((a_pod(0), a_pod(1))) == {"node-0": 8.0}
