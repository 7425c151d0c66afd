"""Every prefix of every plan is a legal state: the operator is killed at each of its writes, before
or after the effect, and a new operator must reach the same end state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.passes import Passes
from everstep_operator.kube import Kube
from everstep_operator.values import NodeState, NodeVerdict
from everstep_operator.world import World
from job_builders import a_spec, a_verdict
from toy_jobs import Cut, Cutter, ToyCluster, ToyJob

KEY = ("team", "lm")
PASSES = 60
"""More than any story needs; a story that needs more does not converge."""


@dataclass
class Story:
    """One run on the toy cluster; an operator that is killed is replaced by a new one."""

    cutter: Cutter = field(default_factory=Cutter)
    verdicts: dict[str, NodeVerdict] = field(default_factory=dict)
    begun: int = 0
    """Number of writes until the job trained for the first time."""
    checked: int = 0
    """Number of deletions that have been checked."""

    def __post_init__(self) -> None:
        self.cluster = ToyCluster(cutter=self.cutter)
        self.job = ToyJob(cluster=self.cluster)
        for number in range(6):
            self.cluster.add_node(f"node-{number}")
        metadata = {"name": "lm", "namespace": "team", "generation": 1}
        spec = a_spec(
            recovery={"nodeLostSeconds": 3, "drainTimeoutSeconds": 20, "startupSeconds": 5}
        )
        self.cluster.put(kube.JOBS, {"metadata": metadata, "spec": spec})
        self.passes = self._operator()

    def _operator(self) -> Passes:
        return Passes(
            port=cast(Kube, self.cluster), world=World(), agents=cast(Agents, self.job),
            key=b"k" * 32, clock=lambda: self.cluster.now, steady=lambda: self.cluster.now,
            figures_seconds=10.0,
        )  # fmt: skip

    async def play(self, done: Callable[["Story"], bool]) -> None:
        for _ in range(PASSES):
            await self._turn()
            if done(self) and not await self._restless():
                self.begun = self.begun or self.cutter.writes
                return
        raise AssertionError(f"not there after {PASSES} passes: {self.digest()}")

    async def _turn(self) -> None:
        self.cluster.feed(self.passes.world)
        self.passes.verdicts = self.verdicts
        try:
            await self.passes.run(KEY)
        except Cut:
            self.passes = self._operator()
        self._check_deletions()
        self.cluster.tick()
        self.job.tick()
        self._check()

    async def _restless(self) -> bool:
        """Whether the operator still acts. At rest it writes only figures, and no more than once in
        two turns.
        """
        writes = self.cutter.writes
        await self._turn()
        await self._turn()
        return self.cutter.writes > writes + 1

    def _check(self) -> None:
        """Check what must hold at every moment."""
        status = self.cluster.job().get("status") or {}
        attempts = {s["slot"]: s["attempt"] for s in status.get("slots") or ()}
        for pod in self.cluster.pods():
            labels = pod["metadata"]["labels"]
            slot, attempt = int(labels[names.LABEL_SLOT]), int(labels[names.LABEL_ATTEMPT])
            assert attempt <= attempts.get(slot, attempt), "a pod ahead of its count"

    def _check_deletions(self) -> None:
        """A member of the running epoch is deleted only if the job reported that it left, or its
        node is gone.

        Checked before the kubelets and the job act, because afterwards the deleted pod is no longer
        a member.
        """
        new, self.checked = self.cluster.deleted[self.checked :], len(self.cluster.deleted)
        for pod in new:
            member = self.job.running and (pod.slot, pod.attempt) in self.job.members
            allowed = (pod.slot, pod.attempt) in self.job.left or self._is_gone(pod.node)
            assert allowed or not member, (
                f"member {pod.slot}/{pod.attempt} on {pod.node} was deleted"
            )

    def _is_gone(self, node: str | None) -> bool:
        verdict = self.verdicts.get(node or "")
        return verdict is not None and verdict.state is NodeState.GONE

    def digest(self) -> Mapping[str, Any]:
        status = self.cluster.job().get("status") or {}
        return {
            "state": status.get("state"),
            "attempts": [s["attempt"] for s in status.get("slots") or ()],
            "restarts": (status.get("restarts") or {}).get("byCause"),
            "incidents": sorted((i["id"], i["open"]) for i in status.get("incidents") or ()),
            "recoveries": [(r["rung"], r["count"]) for r in status.get("recoveries") or ()],
            "pods": sorted(p["metadata"]["name"] for p in self.cluster.pods()),
            "running": self.job.running,
        }


def trains(story: Story) -> bool:
    state = (story.cluster.job().get("status") or {}).get("state")
    return story.job.running and len(story.job.members) == 3 and state == "Running"


def state_is(word: str) -> Callable[[Story], bool]:
    return lambda story: (story.cluster.job().get("status") or {}).get("state") == word


async def start(story: Story) -> None:
    await story.play(trains)


async def node_leaves(story: Story) -> None:
    await story.play(trains)
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.LEAVING)
    await story.play(lambda s: trains(s) and (1, 2) in s.job.members)


async def node_goes(story: Story) -> None:
    await story.play(trains)
    story.cluster.kill_node("node-1")
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.GONE)
    await story.play(lambda s: trains(s) and (1, 2) in s.job.members)


async def node_dies(story: Story) -> None:
    await story.play(trains)
    story.cluster.kill_node("node-2")
    await story.play(lambda s: trains(s) and (2, 2) in s.job.members)


async def pod_deleted(story: Story) -> None:
    await story.play(trains)
    story.cluster.mark_deleted(kube.PODS, "lm-0-1")
    await story.play(lambda s: trains(s) and (0, 2) in s.job.members)


async def pod_stuck_on_its_node(story: Story) -> None:
    """After the deletion the former pod's node is the first free one (`free[0]`), so the next pod
    is bound to it. But its kubelet no longer starts anything.
    """
    await story.play(trains)
    story.cluster.stuck_nodes.add("node-0")
    story.cluster.mark_deleted(kube.PODS, "lm-0-1")
    await story.play(lambda s: trains(s) and (0, 3) in s.job.members)


async def node_refuses(story: Story) -> None:
    await story.play(trains)
    story.cluster.refusing_nodes.add("node-0")
    story.cluster.mark_deleted(kube.PODS, "lm-0-1")
    await story.play(lambda s: trains(s) and (0, 3) in s.job.members)


async def two_nodes_leave(story: Story) -> None:
    await story.play(trains)
    for node in ("node-0", "node-2"):
        story.verdicts[node] = a_verdict(node, NodeState.LEAVING, incident=f"inc-{node}")
    await story.play(lambda s: trains(s) and {(0, 2), (2, 2)} <= s.job.members)


async def suspend_and_resume(story: Story) -> None:
    await story.play(trains)
    story.cluster.edit_spec({"suspend": True})
    await story.play(lambda s: state_is("Suspended")(s) and not s.cluster.pods())
    story.cluster.edit_spec({"suspend": False})
    await story.play(trains)


async def scale_down(story: Story) -> None:
    await story.play(trains)
    story.cluster.edit_spec({"workers": {"replicas": 2}})
    await story.play(lambda s: s.job.running and len(s.cluster.pods()) == 2)


async def spare_takes_over(story: Story) -> None:
    """The spare replaces the lost pod, and the lost slot's next pod becomes the spare."""
    await _play_with_spare(story)
    story.cluster.kill_node("node-1")
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.GONE)
    await story.play(lambda s: trains(s) and (3, 1) in s.job.members and s.job.spares == {(1, 2)})


async def spare_takes_over_from_one_that_leaves(story: Story) -> None:
    await _play_with_spare(story)
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.LEAVING)
    await story.play(lambda s: trains(s) and (3, 1) in s.job.members and s.job.spares == {(1, 2)})


async def spare_lost(story: Story) -> None:
    await _play_with_spare(story)
    story.cluster.mark_deleted(kube.PODS, "lm-3-1")
    await story.play(lambda s: trains(s) and s.job.spares == {(3, 2)})


async def scale_down_with_a_spare(story: Story) -> None:
    await _play_with_spare(story)
    story.cluster.edit_spec({"workers": {"replicas": 2}})
    await story.play(
        lambda s: s.job.running and len(s.cluster.pods()) == 3 and s.job.spares == {(3, 1)}
    )


async def no_more_spares(story: Story) -> None:
    await _play_with_spare(story)
    story.cluster.edit_spec({"workers": {"spares": 0}})
    await story.play(lambda s: trains(s) and len(s.cluster.pods()) == 3)


async def suspect_node_breaks(story: Story) -> None:
    """The job has no spares, and gets one before the node breaks."""
    await story.play(trains)
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.SUSPECT, evidence=("gpu",))
    await story.play(lambda s: trains(s) and s.job.spares == {(3, 1)})
    story.cluster.kill_node("node-1")
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.GONE, evidence=("gpu",))
    await story.play(lambda s: trains(s) and (3, 1) in s.job.members)


async def suspicion_ends(story: Story) -> None:
    await story.play(trains)
    story.verdicts["node-1"] = a_verdict("node-1", NodeState.SUSPECT, evidence=("gpu",))
    await story.play(lambda s: trains(s) and s.job.spares == {(3, 1)})
    story.verdicts.clear()
    await story.play(lambda s: trains(s) and len(s.cluster.pods()) == 3)


async def _play_with_spare(story: Story) -> None:
    story.cluster.edit_spec({"workers": {"spares": 1}})
    await story.play(lambda s: trains(s) and s.job.spares == {(3, 1)})


async def finish(story: Story) -> None:
    await story.play(trains)
    story.job.done = True
    await story.play(state_is("Complete"))


STORIES = [
    start, node_leaves, node_goes, node_dies, pod_deleted, pod_stuck_on_its_node, node_refuses,
    two_nodes_leave, suspend_and_resume, scale_down, finish, spare_takes_over,
    spare_takes_over_from_one_that_leaves, spare_lost, no_more_spares,
    suspect_node_breaks, suspicion_ends,
]  # fmt: skip


@pytest.mark.parametrize("tell", STORIES, ids=lambda f: f.__name__)
async def test_an_operator_killed_at_any_write_leaves_work_that_another_completes(
    tell: Any,
) -> None:
    whole = Story()
    await tell(whole)
    first = 0 if tell is start else whole.begun  # what comes before is the story `start`
    for at in range(first + 1, whole.cutter.writes + 1):
        for after in (False, True):
            story = Story(cutter=Cutter(at=at, after=after))
            await tell(story)
            assert story.digest() == whole.digest(), (
                f"cut {'after' if after else 'before'} write {at}"
            )


async def test_a_job_that_shrinks_keeps_its_spare_wherever_the_operator_is_killed() -> None:
    """If the operator dies before it has noted the request to shrink, and the job shrinks
    meanwhile, the request has no entry among incidents and recoveries.
    """
    whole = Story()
    await scale_down_with_a_spare(whole)
    for at in range(whole.begun + 1, whole.cutter.writes + 1):
        for after in (False, True):
            story = Story(cutter=Cutter(at=at, after=after))
            await scale_down_with_a_spare(story)
            unnoted = {"incidents": (), "recoveries": ()}
            assert {**story.digest(), **unnoted} == {**whole.digest(), **unnoted}


async def test_a_quiet_job_costs_one_write_in_ten_seconds() -> None:
    story = Story()
    await start(story)
    before = story.cutter.writes
    for _ in range(30):
        await story._turn()
    assert story.cutter.writes - before <= 4


async def test_the_pod_that_replaces_another_is_on_another_node_under_another_name() -> None:
    story = Story()
    await node_leaves(story)
    moved = story.cluster.objects["pods", "lm-1-2"]
    assert moved["spec"]["nodeName"] not in ("node-0", "node-1", "node-2")
    incident = story.cluster.job()["status"]["incidents"][0]
    marks = [m["name"] for m in incident["marks"]]
    assert marks == ["leave", "commit", "left", "deleted", "created", "running"]
    assert (incident["open"], incident["node"], incident["slot"]) == (False, "node-1", 1)


async def test_a_former_pod_of_whose_end_no_watch_told_is_deleted_once() -> None:
    """After a restart the API server has no history: the watch starts again, and does not report
    what was deleted meanwhile.
    """
    story = Story()
    await story.play(trains)
    story.job.left.add((1, 1))
    story.cluster.feed(story.passes.world)
    await story.passes.run(KEY)  # counts the attempt
    story.cluster.mark_deleted(kube.PODS, "lm-1-1", force=True)
    await story.passes.run(KEY)
    assert story.passes.world.pods.get("lm-1-1", "team") is None


async def test_a_member_deleted_too_early_is_noticed_though_another_node_is_gone() -> None:
    story = Story()
    await story.play(trains)
    story.verdicts["node-2"] = a_verdict("node-2", NodeState.GONE)
    pod = story.cluster.objects["pods", "lm-1-1"]
    assert pod["spec"]["nodeName"] == "node-1"
    await story.cluster.delete(kube.PODS, "lm-1-1", uid=pod["metadata"]["uid"])
    with pytest.raises(AssertionError, match="member 1/1 on node-1 was deleted"):
        story._check_deletions()
