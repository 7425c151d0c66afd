"""What a pass does around its plan: it confirms a loss before counting it, and reports errors."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs import passes
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.clocks import Clocks, measure
from everstep_operator.jobs.observed import Observed
from everstep_operator.kube import Kube
from everstep_operator.model_status import Condition
from everstep_operator.pacing import Bucket, Lane
from everstep_operator.scheduler import Scheduler
from everstep_operator.values import NodeState
from everstep_operator.world import Key, World
from job_builders import a_job, a_slot, a_spec, a_status, a_verdict, an_observation
from toy_jobs import ToyCluster, ToyJob

KEY = ("team", "lm")


def an_operator(cluster: ToyCluster, replicas: int = 3) -> passes.Passes:
    metadata = {"name": "lm", "namespace": "team", "generation": 1}
    cluster.put(kube.JOBS, {"metadata": metadata, "spec": a_spec(replicas=replicas)})
    made = passes.Passes(
        port=cast(Kube, cluster), world=World(), agents=cast(Agents, ToyJob(cluster=cluster)),
        key=b"k" * 32, clock=lambda: cluster.now, steady=lambda: cluster.now, figures_seconds=10.0,
    )  # fmt: skip
    cluster.feed(made.world)
    return made


def failing(error: Exception) -> Any:
    def plan(*_: object) -> None:
        raise error

    return plan


def told(cluster: ToyCluster) -> list[str]:
    return [e["message"] for (plural, _), e in cluster.objects.items() if plural == "events"]


@pytest.mark.parametrize(
    ("error", "words", "fix"),
    [
        (ZeroDivisionError("by nothing"), "ZeroDivisionError: by nothing", "please report it"),
        (kube.Denied(403, "Forbidden", "cannot patch"), "cannot patch", "rights back"),
    ],
)
async def test_it_says_so_once_on_the_job_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, fix: str
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    monkeypatch.setattr(passes, "plan", failing(error))
    for _ in range(3):
        with pytest.raises(type(error)):
            await operator.run(KEY)
    (message,) = told(cluster)
    assert words in message
    assert fix in message


async def test_what_may_pass_by_itself_is_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    monkeypatch.setattr(passes, "plan", failing(kube.Transient(503, "", "away")))
    with pytest.raises(kube.Transient):
        await operator.run(KEY)
    assert told(cluster) == []


async def placed_pods(cluster: ToyCluster, operator: passes.Passes) -> None:
    """Create three pods that run on node-0 to node-2 and that all watches have reported."""
    for number in range(3):
        cluster.add_node(f"node-{number}")
    operator.verdicts = {}
    cluster.feed(operator.world)
    await operator.run(KEY)
    for _ in range(3):
        cluster.tick()
        cluster.feed(operator.world)
        await operator.run(KEY)


async def test_a_node_that_the_watch_has_not_told_of_yet_is_not_lost() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    before = [s["attempt"] for s in cluster.job()["status"]["slots"]]
    held = operator.world.nodes.get("node-1")
    assert held is not None
    others = [node for node in operator.world.nodes if node is not held]
    operator.world.nodes.replace(others, "1000000")  # the pod watch is ahead of the node watch
    await operator.run(KEY)
    await operator.run(KEY)
    status = cluster.job()["status"]
    assert [s["attempt"] for s in status["slots"]] == before
    assert status["restarts"]["byCause"] == {}
    assert operator.world.nodes.get("node-1") is not None, "the node must be read by name and kept"


async def test_a_waiting_pod_is_not_replaced_for_a_node_that_no_longer_exists() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    operator.verdicts = {"node-9": a_verdict("node-9", NodeState.LEAVING)}
    for _ in range(3):
        await operator.run(KEY)
        cluster.feed(operator.world)
    for pod in cluster.pods():
        no_room = {"type": "PodScheduled", "status": "False", "message": "no nodes"}
        pod["status"] = {"phase": "Pending", "conditions": [no_room]}
        cluster._touch(pod)
    operator.verdicts = {}
    cluster.feed(operator.world)
    await operator.run(KEY)
    assert attempts_of(cluster) == [1, 1, 1]
    cluster.add_node("node-9")
    cluster.feed(operator.world)
    await operator.run(KEY)
    assert sorted(attempts_of(cluster)) == [1, 1, 2], "one pod tries it"


async def test_a_node_that_the_api_server_has_no_more_is_lost_at_once() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    del cluster.objects["nodes", "node-1"]
    cluster.feed(operator.world)
    await operator.run(KEY)
    lost = [s for s in cluster.job()["status"]["slots"] if s.get("cause") == "NodeLost"]
    assert [(s["attempt"], s["formerNode"]) for s in lost] == [(2, "node-1")]


def attempts_of(cluster: ToyCluster) -> list[int]:
    return [slot["attempt"] for slot in cluster.job()["status"]["slots"]]


async def test_a_job_none_of_whose_possible_nodes_is_ready_keeps_its_pods() -> None:
    """The API server has lost contact with all nodes, and their pods may still train."""
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    for name in ("node-0", "node-1", "node-2"):
        cluster.kill_node(name)
    for _ in range(4):
        cluster.feed(operator.world)
        await operator.run(KEY)
        cluster.now += 300
    assert attempts_of(cluster) == [1, 1, 1]
    running = next(c for c in cluster.job()["status"]["conditions"] if c["type"] == "Running")
    assert running["reason"] == "NoNodeReady"
    assert "none of the 3 nodes that could run the job's pods is Ready" in running["message"]
    assert any("none of the 3 nodes" in text for text in told(cluster)), "an Event, too"


async def test_nodes_that_are_lost_one_after_the_other_are_given_up_although_none_is_ready() -> (
    None
):
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    for name in ("node-0", "node-1", "node-2"):
        cluster.kill_node(name)
        cluster.feed(operator.world)
        await operator.run(KEY)
        cluster.now += 121
    await operator.run(KEY)
    assert attempts_of(cluster) == [2, 2, 2]


async def test_a_node_is_lost_only_if_it_is_not_ready_for_long_while_another_one_is() -> None:
    """Nodes do not become Ready all at the same moment."""
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    for name in ("node-0", "node-1", "node-2"):
        cluster.kill_node(name)
    cluster.feed(operator.world)
    await operator.run(KEY)
    cluster.now += 600
    await operator.run(KEY)
    cluster.revive_node("node-0")
    for wait in (0, 59):
        cluster.now += wait
        cluster.feed(operator.world)
        await operator.run(KEY)
    assert attempts_of(cluster) == [1, 1, 1]
    cluster.now += 2
    await operator.run(KEY)
    assert attempts_of(cluster) == [1, 2, 2]


async def test_a_node_that_is_ready_again_is_not_lost_though_its_watch_has_stopped() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    cluster.kill_node("node-1")
    cluster.feed(operator.world)
    await operator.run(KEY)
    cluster.revive_node("node-1")
    cluster.now += 61
    assert await operator.run(KEY) == 0.0
    await operator.run(KEY)
    assert attempts_of(cluster) == [1, 1, 1]
    cluster.kill_node("node-1")
    for wait in (0, 61):
        cluster.now += wait
        cluster.feed(operator.world)
        await operator.run(KEY)
    assert attempts_of(cluster) == [1, 2, 1]


async def test_a_clock_that_is_set_an_hour_ahead_ends_no_wait() -> None:
    cluster = ToyCluster(stuck_nodes={"node-2"})
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    cluster.kill_node("node-1")
    cluster.feed(operator.world)
    await operator.run(KEY)
    before = [s["attempt"] for s in cluster.job()["status"]["slots"]]
    operator.clock = lambda: cluster.now + 3600
    await operator.run(KEY)
    status = cluster.job()["status"]
    assert [s["attempt"] for s in status["slots"]] == before
    assert status["restarts"]["byCause"] == {}


async def test_a_pass_creates_some_pods_of_a_large_job_and_the_next_one_follows_at_once() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster, replicas=70)
    operator.verdicts = {}
    pauses = [await operator.run(KEY) for _ in range(3)]
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2] != 0.0
    assert len(cluster.made) == 70


async def test_no_attempt_is_used_twice_if_its_pod_vanishes_before_a_watch_tells_of_it() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    operator.verdicts = {}
    await operator.run(KEY)
    await operator.run(KEY)
    del cluster.objects["pods", "lm-1-1"]
    cluster.feed(operator.world)
    await operator.run(KEY)
    await operator.run(KEY)
    assert sorted(cluster.made) == ["lm-0-1", "lm-1-1", "lm-1-2", "lm-2-1"]


async def test_a_suspended_job_has_pods_though_no_watch_has_told_of_them_yet() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    operator.verdicts = {}
    await operator.run(KEY)
    writes = cluster.cutter.writes
    cluster.edit_spec({"suspend": True})
    operator.world.jobs.put(cluster.job())
    await operator.run(KEY)
    status = cluster.job()["status"]
    assert status["state"] == "Suspending", "a queue would give the nodes away"
    assert cluster.cutter.writes == writes + 1, "only the status is written"


async def test_a_pod_may_save_for_its_grace_period_though_the_api_servers_clock_is_behind() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    operator.clock = lambda: cluster.now + 120

    async def attempts() -> list[int]:
        cluster.feed(operator.world)
        await operator.run(KEY)
        return [s["attempt"] for s in cluster.job()["status"]["slots"]]

    cluster.mark_deleted(kube.PODS, "lm-1-1")
    assert await attempts() == [1, 1, 1]
    cluster.now += 29
    assert await attempts() == [1, 1, 1]
    cluster.now += 2
    assert await attempts() == [1, 2, 1]


class Paced(ToyCluster):
    """Each write waits for its token, as in `kube.Kube`."""

    bucket: Bucket
    begun: asyncio.Event

    async def create(self, *args: Any, **given: Any) -> Any:
        self.begun.set()
        await self.bucket.take(given.get("lane", Lane.RECOVERY))
        return await super().create(*args, **given)


async def test_the_start_of_a_large_job_holds_up_no_other_job() -> None:
    cluster, others, made = Paced(), ("team", "other"), list[int]()
    cluster.bucket, cluster.begun = Bucket(qps=500.0, burst=4), asyncio.Event()
    operator = an_operator(cluster, replicas=60)
    operator.verdicts = {}
    done = asyncio.Event()

    async def run_pass(key: Key) -> None:
        if key == KEY:
            await operator.run(KEY)
            return
        await cluster.bucket.take(Lane.STATUS)
        made.append(len(cluster.made))
        done.set()

    found = Scheduler(run_pass, at_once=1)
    task = asyncio.create_task(found.run())
    found.wake(KEY)
    async with asyncio.timeout(10):
        await cluster.begun.wait()
        found.wake(others)
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made[0] < 60, "the other job's status waited until all pods existed"


async def test_events_about_what_was_observed_delay_no_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    create, replaced = cluster.create, dict[str, list[int]]()

    async def note_create(kind: kube.Kind, body: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is kube.EVENTS:
            replaced[body["reason"]] = [d.slot for d in cluster.deleted]
        return await create(kind, body, *args, **kwargs)

    monkeypatch.setattr(cluster, "create", note_create)
    cluster.end_container("lm-0-1", reason="OOMKilled")
    del cluster.objects["nodes", "node-1"]
    for _ in range(2):
        cluster.feed(operator.world)
        await operator.run(KEY)
    assert replaced["OOMKilled"] == [1], "slot 1, whose node was lost, came first"


def test_a_clock_runs_as_long_as_something_is_so_and_then_begins_anew() -> None:
    clocks = Clocks()
    assert clocks.read("kind", ["a"], 10.0) == {"a": 0.0}
    assert clocks.read("other", ["a"], 11.0) == {"a": 0.0}
    assert clocks.read("kind", ["a", "b"], 15.0) == {"a": 5.0, "b": 0.0}
    assert clocks.read("kind", ["b"], 16.0) == {"b": 1.0}
    assert clocks.read("kind", ["a"], 20.0) == {"a": 0.0}


async def test_nodes_on_which_pods_do_not_start_are_told_and_taken_back_with_the_job() -> None:
    told: list[tuple[passes.Key, dict[str, int]]] = []
    cluster = ToyCluster(refusing_nodes={"node-0"})
    operator = an_operator(cluster)
    operator.on_failed_starts = lambda job, nodes: told.append((job, dict(nodes)))
    await placed_pods(cluster, operator)
    for _ in range(12):
        cluster.tick()
        cluster.feed(operator.world)
        await operator.run(KEY)
    assert told == [(KEY, {"node-0": 1})]
    del cluster.objects[names.PLURAL, "lm"]
    cluster.feed(operator.world)
    await operator.run(KEY)
    assert told[1:] == [(KEY, {})]


async def test_a_job_made_again_under_its_name_has_no_failed_starts() -> None:
    """No pass ran while there was none, so the node would stay suspect."""
    told: list[tuple[passes.Key, dict[str, int]]] = []
    cluster = ToyCluster(refusing_nodes={"node-0"})
    operator = an_operator(cluster)
    operator.on_failed_starts = lambda job, nodes: told.append((job, dict(nodes)))
    await placed_pods(cluster, operator)
    for _ in range(12):
        cluster.tick()
        cluster.feed(operator.world)
        await operator.run(KEY)
    metadata = {"name": "lm", "namespace": "team", "generation": 1}
    cluster.put(kube.JOBS, {"metadata": metadata, "spec": {**a_spec(), "suspend": True}})
    cluster.feed(operator.world)
    await operator.run(KEY)
    assert told == [(KEY, {"node-0": 1}), (KEY, {})]


def test_the_limits_of_a_drain_a_stop_and_an_end_count_from_when_this_process_saw_them() -> None:
    """The times in status are of the former leader's clock."""
    then = "2001-01-01T00:00:00Z"
    over = Condition(
        type="Failed", status="True", reason="x", message="", last_transition_time=then
    )
    slots = [a_slot(0), a_slot(1, leaving_since=then)]
    status = a_status(slots=slots, conditions=[over], stopping_since=then)
    observed = an_observation(job=a_job(status=status))
    clocks = Clocks()
    first, later = measure(clocks, observed, 100.0), measure(clocks, observed, 105.0)
    assert (first.leaving_for, first.stopping_for, first.over_for) == ({(1, 1): 0.0}, 0.0, 0.0)
    assert (later.leaving_for, later.stopping_for, later.over_for) == ({(1, 1): 5.0}, 5.0, 5.0)


async def test_a_pod_that_is_up_for_moments_is_not_started() -> None:
    """A container in a crash loop runs now and then; its time to start keeps counting."""
    clocks, up = Clocks(), an_observation(callers=frozenset({"uid-0-1"}), seen=None)
    down = with_container(up, running_since=None)
    assert measure(clocks, down, 0.0).starting_for["uid-0-1"] == 0.0
    assert measure(clocks, with_container(up), 300.0).starting_for["uid-0-1"] == 300.0
    assert measure(clocks, down, 310.0).starting_for["uid-0-1"] == 310.0
    assert measure(clocks, with_container(up), 320.0).starting_for["uid-0-1"] == 320.0
    assert "uid-0-1" not in measure(clocks, with_container(up), 381.0).starting_for, (
        "a container that stays up counts as started"
    )
    assert measure(clocks, down, 400.0).starting_for["uid-0-1"] == 0.0


def with_container(observed: Observed, **changes: Any) -> Observed:
    """Change only the pod of slot 0."""
    return replace(observed, pods=(replace(observed.pods[0], **changes),))


def refusing(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch, kind: kube.Kind, error: kube.KubeError
) -> None:
    """Let creates of this kind fail, as an admission that runs before the object is looked for."""
    create = cluster.create

    async def fail(given: kube.Kind, *arguments: Any, **named: Any) -> Any:
        if given is kind:
            raise error
        return await create(given, *arguments, **named)

    monkeypatch.setattr(cluster, "create", fail)


async def test_a_quota_that_refuses_the_secret_that_exists_stops_no_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    operator._memories.clear()  # as after a restart of the operator
    refusing(cluster, monkeypatch, kube.SECRETS, kube.Denied(403, "Forbidden", "exceeded quota"))
    del cluster.objects["nodes", "node-1"]
    for _ in range(4):
        cluster.feed(operator.world)
        await operator.run(KEY)
        cluster.tick()
    assert ("pods", "lm-1-2") in cluster.objects


async def test_a_spare_that_a_quota_refuses_in_the_dry_run_is_no_refusal_of_the_job() -> None:
    """The operator has restarted, so the template is to be checked, and only the spare is missing."""
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    cluster.edit_spec({"workers": {"spares": 1}})
    cluster.feed(operator.world)
    operator._memories.clear()
    cluster.refuses = "exceeded quota"
    await operator.run(KEY)
    memory = operator._memories[KEY]
    assert memory.refusal is None
    assert memory.spare_refusal is not None


async def test_an_edit_ends_what_status_says_about_a_refused_spare() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    cluster.edit_spec({"workers": {"spares": 1}})
    cluster.feed(operator.world)
    cluster.refuses = "exceeded quota"
    await operator.run(KEY)
    refusal = operator.observe(cluster.job()).spare_refusal
    assert refusal is not None
    assert refusal.message == "exceeded quota"
    cluster.edit_spec({"recovery": {"gangSeconds": 100}})
    assert operator.observe(cluster.job()).spare_refusal is None


class Quota(ToyCluster):
    """A cluster with a quota of pods, which a dry run must not exceed either."""

    allowed: int = 3
    tried: list[str]

    async def create(self, *args: Any, **given: Any) -> Any:
        kind, body, *_ = args
        if kind is kube.PODS:
            self.tried.append(body["metadata"]["name"])
            self.refuses = "exceeded quota" if len(self.pods()) >= self.allowed else ""
        return await super().create(*args, **given)


async def refused_resize() -> tuple[Quota, passes.Passes]:
    """Three pods run, a resize has asked for a fourth, and a quota of three refuses it."""
    cluster = Quota()
    cluster.tried = []
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)
    cluster.tried.clear()
    cluster.edit_spec({"workers": {"replicas": 4}})
    await run_passes(cluster, operator)
    assert cluster.tried == ["lm-3-1"]
    cluster.tried.clear()
    return cluster, operator


async def run_passes(cluster: ToyCluster, operator: passes.Passes, after: float = 0.0) -> None:
    """As many passes as one change needs; no time passes between them."""
    cluster.now += after
    for _ in range(4):
        cluster.feed(operator.world)
        await operator.run(KEY)


async def test_a_quota_that_refuses_a_resize_does_not_delay_the_next_pod_of_a_lost_slot() -> None:
    cluster, operator = await refused_resize()
    del cluster.objects["pods", "lm-1-1"]
    await run_passes(cluster, operator)
    assert cluster.tried == ["lm-1-2", "lm-1-2"], "a dry run of the edited template, and the pod"
    assert ("pods", "lm-1-2") in cluster.objects
    await run_passes(cluster, operator, after=29)
    assert cluster.tried[2:] == [], "the pause after the refusal of the resize goes on"
    await run_passes(cluster, operator, after=1)
    assert cluster.tried[2:] == ["lm-3-1"]


async def test_a_pod_that_is_refused_again_writes_no_status() -> None:
    cluster = Quota()
    cluster.allowed = 0
    cluster.tried = []
    operator = an_operator(cluster)
    operator.verdicts = {}
    await run_passes(cluster, operator)
    status = cluster.job()["status"]
    assert reason_of(status) == "PodRefused"
    cluster.tried.clear()
    cluster.now += 30
    cluster.feed(operator.world)
    await operator.run(KEY)
    assert cluster.tried == ["lm-0-1"]
    assert cluster.job()["status"] == status
    cluster.allowed = 3
    await run_passes(cluster, operator, after=30)
    assert reason_of(cluster.job()["status"]) == "PodsStarting"


def reason_of(status: Mapping[str, Any]) -> str:
    (found,) = [c["reason"] for c in status["conditions"] if c["type"] == "Running"]
    return str(found)


async def test_a_quota_that_has_room_again_goes_to_the_lost_slot_and_not_to_the_resize() -> None:
    cluster, operator = await refused_resize()
    cluster.allowed = 2
    del cluster.objects["pods", "lm-1-1"]
    await run_passes(cluster, operator)
    assert cluster.tried == ["lm-1-2"]
    cluster.allowed = 3
    await run_passes(cluster, operator, after=1)
    assert cluster.tried[1:] == [], "both wait"
    await run_passes(cluster, operator, after=1)
    assert cluster.tried[1:] == ["lm-1-2", "lm-1-2", "lm-3-1"]
    assert ("pods", "lm-1-2") in cluster.objects


async def test_the_next_pod_of_a_lost_slot_is_tried_soon_and_then_less_often() -> None:
    """A quota counts the lost pod until it has ended."""
    cluster, operator = await refused_resize()
    cluster.allowed = 2
    del cluster.objects["pods", "lm-1-1"]
    tried = []
    for second in range(91):
        await run_passes(cluster, operator, after=min(second, 1))
        tried += [(second, name) for name in cluster.tried]
        cluster.tried.clear()
    assert tried == [(second, "lm-1-2") for second in (0, 2, 6, 14, 30, 60, 90)]


async def test_a_refusal_is_forgotten_once_the_spec_no_longer_asks_for_the_pod() -> None:
    """Otherwise status would explain each later loss with it."""
    cluster, operator = await refused_resize()
    cluster.edit_spec({"workers": {"replicas": 3}})
    await run_passes(cluster, operator)
    assert operator._memories[KEY].refusal is None


@pytest.mark.parametrize(
    "error",
    [
        kube.Denied(403, "Forbidden", "a policy forbids to delete pods"),
        kube.Transient(500, "", 'failed calling webhook "x"'),
    ],
)
async def test_a_deletion_that_is_refused_stops_no_replacement(
    monkeypatch: pytest.MonkeyPatch, error: kube.KubeError
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    await placed_pods(cluster, operator)

    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(cluster, "delete", refuse)
    del cluster.objects["nodes", "node-1"]
    results = []
    for _ in range(3):
        cluster.feed(operator.world)
        results += await asyncio.gather(operator.run(KEY), return_exceptions=True)
    assert error in results, "it is tried again"
    assert ("pods", "lm-1-2") in cluster.objects


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (kube.Transient(503, "", "away"), True, ""),
        (kube.Transient(500, "", 'failed calling webhook "x"'), False, "failed calling webhook"),
    ],
)
async def test_status_is_written_although_no_pod_can_be_created(
    monkeypatch: pytest.MonkeyPatch, error: kube.Transient, raised: bool, told: str
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    operator.verdicts = {}
    refusing(cluster, monkeypatch, kube.PODS, error)
    results = []
    for _ in range(3):
        cluster.feed(operator.world)
        results += await asyncio.gather(operator.run(KEY), return_exceptions=True)
    assert (error in results) is raised
    status = cluster.job()["status"]
    assert status["conditions"]
    assert told in status["message"]


async def test_a_pod_of_an_earlier_job_of_this_name_is_waited_for() -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    operator.verdicts = {}
    owner = {"kind": names.KIND, "name": "lm", "uid": "earlier", "controller": True}
    metadata = {"name": "lm-0-1", "namespace": "team", "ownerReferences": [owner]}
    cluster.put(kube.PODS, {"metadata": metadata, "spec": {}, "status": {}})
    for _ in range(3):
        cluster.feed(operator.world)
        await operator.run(KEY)
    said = cluster.job()["status"]["message"]
    assert "pod lm-0-1 of an earlier job of this name is still ending" in said
