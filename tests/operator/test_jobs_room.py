"""A job gives up a spare for a pod of another job that has no room."""

from typing import Any

import pytest

from everstep_contract import names
from everstep_operator.jobs import observe, room
from everstep_operator.jobs.genuine import Place as PodPlace
from everstep_operator.jobs.room import Grant, Need, Place, Room
from everstep_operator.world import World

NOW = 1_000_000.0
MINE, OTHER = ("team", "with-spare"), ("team", "waits")


def a_need(uid="w-0", **changes):
    values = {
        "job": OTHER,
        "requests": {"nvidia.com/gpu": 1},
        "selector": {},
        "avoids": frozenset(),
    }
    return Need(uid=uid, **(values | changes))


def a_place(slot=3, **changes):
    held = {"nvidia.com/gpu": 1.0, "cpu": 4.0, "memory": 2.0**30}
    values = {"job": MINE, "requests": held, "node": "node-3", "labels": {"pool": "a"}}
    return Place(slot=slot, **(values | changes))


@pytest.mark.parametrize(
    ("need", "fits"),
    [
        ({}, True),
        ({"requests": {"nvidia.com/gpu": 8}}, False),
        ({"requests": {"nvidia.com/gpu": 1, "cpu": 64}}, True),
        ({"requests": {"cpu": 4}}, True),
        ({"requests": {"cpu": 64}}, False),
        ({"requests": {"cpu": float("nan")}}, False),
        ({"requests": {"amd.com/gpu": 1}}, False),
        ({"selector": {"pool": "a"}}, True),
        ({"selector": {"pool": "b"}}, False),
        ({"avoids": frozenset({"node-3"})}, False),
        ({"priority": -1}, False),
        ({"priority": 1}, True),
    ],
)
def test_a_spare_helps_a_pod_that_could_run_in_its_place(need, fits):
    assert room.would_fit(a_need(**need), a_place()) is fits


def test_each_waiting_pod_gets_one_spare_and_never_one_of_its_own_job():
    needs, places = [a_need("w-0"), a_need("w-1"), a_need("w-2")], [a_place(3), a_place(4)]
    found = room.choose_grants(needs, places, {}, NOW)
    assert {uid: g.slot for uid, g in found.items()} == {"w-0": 3, "w-1": 4}
    assert room.choose_grants(needs[:2], places, found, NOW + 9) == {}, (
        "each of them has a spare already"
    )
    assert room.choose_grants([a_need(job=MINE)], places, {}, NOW) == {}


def test_a_spare_that_came_back_may_be_given_to_another_pod_but_not_to_the_same():
    old = {"w-0": Grant(job=MINE, slot=3, at=NOW - room.LENT_SECONDS)}
    needs = [a_need("w-0"), a_need("w-1")]
    assert list(room.choose_grants(needs, [a_place(3)], old, NOW)) == ["w-1"]


# --- as the passes use it ------------------------------------------------------------------------


class Scene:
    """A job with a spare in slot 1, and a job that lacks a pod. Each pod requests one GPU."""

    def __init__(self) -> None:
        self.world, self.version = World(), 0
        self.put_job(MINE, ready=1, spares={"slots": [1]})
        self.put_job(OTHER, ready=0)
        for slot in (0, 1):
            self.put_pod(MINE, slot, node=f"node-{slot}")
            self.world.nodes.put({"metadata": {"name": f"node-{slot}", "uid": f"n{slot}"}})
        self.put_pod(OTHER, 0)
        self.room = Room(self.world, self.pods_of)

    def _meta(self, name: str, **more: Any) -> dict[str, Any]:
        self.version += 1
        return {"name": name, "namespace": "team", "uid": f"u-{name}",
                "resourceVersion": str(self.version), **more}  # fmt: skip

    def put_job(self, key: Any, *, ready: int, **status: Any) -> None:
        spec = {"workers": {"replicas": 1, "spares": 1}}
        status = {"world": {"ready": ready}, **status}
        self.world.jobs.put({"metadata": self._meta(key[1]), "spec": spec, "status": status})

    def put_pod(self, key: Any, slot: int, *, node: str = "") -> None:
        owner = {"kind": names.KIND, "name": key[1], "uid": f"u-{key[1]}", "controller": True}
        found = {
            "type": "PodScheduled",
            "status": "True" if node else "False",
            "message": "no room",
        }
        gpu = {"requests": {"nvidia.com/gpu": "1"}}
        spec = {"containers": [{"name": "trainer", "resources": gpu}]}
        self.world.pods.put(
            {
                "metadata": self._meta(f"{key[1]}-{slot}-1", ownerReferences=[owner]),
                "spec": {**spec, **({"nodeName": node} if node else {})},
                "status": {"phase": "Pending", "conditions": [found]},
            }
        )

    def pods_of(self, job: Any) -> Any:
        found = self.world.pods_of("team", job["metadata"]["uid"])
        places = (
            PodPlace(slot=int(p["metadata"]["name"].split("-")[-2]), attempt=1) for p in found
        )
        return tuple(observe.to_pod(p, place) for p, place in zip(found, places, strict=True))

    def lent(self, now: float) -> set[int]:
        job = self.world.jobs.get(MINE[1], MINE[0])
        assert job is not None
        return set(self.room.find_lent(job, self.pods_of(job), now))


def test_a_spare_is_given_back_after_some_seconds_until_the_pod_has_a_node():
    scene = Scene()
    assert scene.lent(NOW) == set()
    assert scene.lent(NOW + room.WAITING_SECONDS) == {1}
    scene.put_job(MINE, ready=1, spares={"slots": []})
    assert scene.lent(NOW + 20) == {1}, "the spare's pod is gone and must not be created again"
    scene.put_pod(OTHER, 0, node="node-1")
    assert scene.lent(NOW + 25) == set()


def test_a_pod_that_finds_no_node_nevertheless_costs_the_spare_for_a_minute_once():
    scene = Scene()
    scene.lent(NOW)
    at = NOW + room.WAITING_SECONDS
    assert scene.lent(at) == {1}
    assert scene.lent(at + room.LENT_SECONDS) == set()
    assert scene.lent(at + 10 * room.LENT_SECONDS) == set()


@pytest.mark.parametrize("ready", [0, 1], ids=["starting", "training"])
def test_a_spare_that_waits_for_a_node_takes_none_from_another_job(ready: int):
    scene = Scene()
    scene.put_job(OTHER, ready=ready)
    scene.put_pod(OTHER, 0, node="node-2")
    scene.put_pod(OTHER, 1)
    scene.lent(NOW)
    assert scene.lent(NOW + 60) == set()
