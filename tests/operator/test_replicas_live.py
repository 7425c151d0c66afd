"""Two operator processes on a real API server: when the leader ends, the standby takes over.

Each test starts with a leader and a standby.
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_operator import kube
from everstep_operator.jobs import manifests
from everstep_operator.kube import Kube
from everstep_operator.node_leases import DENIED_SECONDS, LIST_SECONDS, NodeLeases
from everstep_operator.tokens import AccountTokens
from everstep_operator.world import World
from job_builders import TEMPLATE, a_job, a_spec
from own_lab import own_lab
from replicas import Replica, install, is_cordoned, start, until

pytestmark = pytest.mark.lab
NETWORK = 87


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with own_lab(LabConfig(nodes=2, operator=False), NETWORK) as lab:
        yield lab


@dataclass(slots=True)
class Pair:
    """A leader and a warm standby. If a test has ended one of them, `mend` starts another."""

    lab: Lab
    config: Path
    folder: Path
    leader: Replica
    standby: Replica
    made: int = 2

    def mend(self) -> None:
        """Set `leader` to the replica that leads now, and wait for a ready standby."""
        if self.leader.process.poll() is not None:
            self.leader, self.standby = self.standby, self.leader
        if self.leader.process.poll() is not None:
            self.leader = self._start()
        until("a replica leads", self.leader.leads)
        if self.standby.process.poll() is not None:
            self.standby = self._start()
        until("a standby is ready", self.standby.is_ready)

    def _start(self) -> Replica:
        self.made += 1
        return Replica(self.lab, self.config, self.folder, f"replica-{self.made}")

    def close(self) -> None:
        self.leader.kill()
        self.standby.kill()


@pytest.fixture(scope="module")
def kept_pair(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("replicas")
    config = install(lab, folder)
    first = Replica(lab, config, folder, "first")
    until("the first leads", first.leads)
    second = Replica(lab, config, folder, "second")
    until("the second is ready", second.is_ready)
    found = Pair(lab, config, folder, first, second)
    yield found
    found.close()


@pytest.fixture
def pair(kept_pair: Pair) -> Pair:
    kept_pair.mend()
    return kept_pair


def cordon(lab: Lab, node: str) -> None:
    """Cordon the node with a fault that convicts it, unless an earlier test has done so."""
    if not is_cordoned(lab, node):
        lab.fault(node, gpu=0, xid=64)
        until(f"{node} is cordoned", lambda: is_cordoned(lab, node))


def test_a_standby_is_ready_writes_nothing_and_tells_of_no_job_or_node(pair: Pair) -> None:
    assert pair.leader.leads()
    shown = pair.standby.fetch("/metrics")
    assert "everstep_operator_leader 0.0" in shown
    assert "everstep_gpu_nodes" not in shown
    assert not re.search(r'api_calls_total\{[^}]*verb="(POST|PATCH|PUT|DELETE)"', shown)


def test_when_the_leader_is_killed_the_other_acts_after_the_lease(lab: Lab, pair: Pair) -> None:
    pair.leader.kill()
    took = until("the standby leads", pair.standby.leads)
    assert took > 5, "it may lead only once the lease is over: 10 s after the last renewal"
    cordon(lab, "node-1")


def test_a_leader_that_slept_writes_nothing_and_ends_when_it_wakes(lab: Lab, pair: Pair) -> None:
    """SIGSTOP for longer than the lease: the standby leads meanwhile, and the old leader may not
    write when it wakes.
    """
    sleeper, successor = pair.leader, pair.standby
    sleeper.process.send_signal(signal.SIGSTOP)
    try:
        until("the standby leads", successor.leads)
    finally:
        sleeper.process.send_signal(signal.SIGCONT)
    assert sleeper.process.wait(30) == 1
    assert "is lost" in sleeper.said
    assert "Nothing is written any more" in sleeper.said
    assert successor.leads(), "the old leader must not lead again"


def test_nodes_are_written_under_the_other_identity_alone(lab: Lab, pair: Pair) -> None:
    cordon(lab, "node-1")
    cordoned = pair.leader.fetch("/metrics")
    if 'identity="nodes",outcome="Done",verb="PATCH"' not in cordoned:  # an earlier leader did
        lab.kubectl("uncordon", "node-1")
        until("our mark is put back", lambda: is_cordoned(lab, "node-1"))
    shown = pair.leader.fetch("/metrics")
    assert re.search(r'api_calls_total\{identity="nodes",outcome="Done",verb="PATCH"\}', shown)
    for account, may in (("everstep-operator", "no"), ("everstep-nodes", "yes")):
        user = f"--as=system:serviceaccount:everstep-system:{account}"
        said = lab.kubectl("auth", "can-i", "patch", "nodes", user, check=False)
        assert said.split()[0] == may


def test_a_quarantine_that_stands_is_written_once(lab: Lab, pair: Pair) -> None:
    def read(name: str) -> float:
        shown = re.search(rf"^{re.escape(name)} (.*)$", pair.leader.fetch("/metrics"), re.M)
        return float(shown[1]) if shown else 0.0

    def count_passes() -> float:
        return read("everstep_fleet_pass_seconds_count")

    cordon(lab, "node-1")
    path = "jsonpath={.items[*].status.state}"
    said = ("get", "nodequarantines", "-o", path)
    until("it is told", lambda: lab.kubectl(*said) == "Quarantined")
    begun = count_passes()
    until("the pass that wrote it is over", lambda: count_passes() > begun)
    patched = read('everstep_fleet_actions_total{action="PatchStatus"}')
    until("two more passes", lambda: count_passes() > begun + 2)
    assert read('everstep_fleet_actions_total{action="PatchStatus"}') == patched


def test_nothing_of_ours_holds_an_object_back(lab: Lab, pair: Pair) -> None:
    cordon(lab, "node-1")
    path = "jsonpath={.items[*].metadata.finalizers}"
    assert lab.kubectl("get", "nodes,nodequarantines", "-o", path) == ""


def test_a_leader_that_is_asked_to_end_hands_over_at_once(pair: Pair) -> None:
    pair.leader.process.send_signal(signal.SIGTERM)
    until("the standby leads", pair.standby.leads)
    assert "it was released" in pair.standby.said
    assert pair.leader.process.wait(30) == 0


def test_release_all_makes_the_leader_stop_and_gives_its_nodes_back(lab: Lab, pair: Pair) -> None:
    cordon(lab, "node-1")
    pair.standby.kill()
    log = pair.folder / "release.log"
    assert start("release-all", lab.kubeconfig, log).wait(120) == 0, log.read_text()
    assert "node node-1: uncordoned, Everstep's taint and mark removed" in log.read_text()
    assert not is_cordoned(lab, "node-1")
    assert lab.kubectl("get", "nodequarantines", "-o", "name") == ""
    assert pair.leader.process.wait(30) == 1
    assert "has taken it. Nothing is written any more" in pair.leader.said
    lab.heal("node-1")


@pytest.fixture
async def admin(lab: Lab) -> Any:
    found = await Kube.connect(kubeconfig=str(lab.kubeconfig))
    yield found
    await found.close()


def a_body(**security: Any) -> dict[str, Any]:
    template = {"spec": {**TEMPLATE["spec"], **security}}
    spec = a_spec()
    job = a_job({**spec, "workers": {**spec["workers"], "template": template}}, namespace="strict")
    assert job.spec is not None
    return manifests.build_pod(job, job.spec, 0, 1)


async def test_one_line_in_the_template_brings_a_pod_into_a_restricted_namespace(
    lab: Lab, admin: Kube
) -> None:
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"metadata": {"name": "strict", "labels": enforced}}
    await admin.create(kube.Kind("", "v1", "namespaces"), namespace)
    account = {"metadata": {"name": "default"}}
    with contextlib.suppress(kube.AlreadyExists):  # the controller created it first
        await admin.create(kube.ACCOUNTS, account, "strict")
    body = a_body(securityContext={"runAsNonRoot": True})
    await admin.create(kube.PODS, body, "strict", dry_run=True)
    with pytest.raises(kube.Denied, match="violates PodSecurity"):
        await admin.create(kube.PODS, a_body(), "strict", dry_run=True)


async def test_a_token_of_the_other_account_is_taken_for_that_account(
    pair: Pair, admin: Kube
) -> None:
    where = "everstep-system", "everstep-nodes"
    nodes = admin.build_other("nodes", AccountTokens(admin, where))
    reviews = kube.Kind("authentication.k8s.io", "v1", "selfsubjectreviews")
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = await nodes.create(reviews, review)
    finally:
        await nodes.close()
    user = answer["status"]["userInfo"]["username"]
    assert user == "system:serviceaccount:everstep-system:everstep-nodes"


def build_leases(port: Kube) -> NodeLeases:
    """Leases are listed only if a job has a pod, so there is one."""
    world = World()
    world.pods.put({"metadata": {"name": "lm-0-1", "namespace": "team", "uid": "u"}})
    return NodeLeases(port, world, lambda key: None)


async def list_until(leases: NodeLeases, expected: set[str]) -> None:
    async with asyncio.timeout(60):
        while leases.list_silent().keys() != expected:
            assert await leases.turn() == LIST_SECONDS
            await asyncio.sleep(LIST_SECONDS / 3)


async def test_a_node_without_power_is_silent_until_it_is_back(lab: Lab, pair: Pair) -> None:
    port = await Kube.connect(kubeconfig=str(pair.config))
    leases = build_leases(port)
    try:
        await list_until(leases, set())
        lab.fault("node-2", kill_node=True)
        await list_until(leases, {"node-2"})
        lab.heal("node-2")
        await list_until(leases, set())
    finally:
        lab.heal("node-2")
        await port.close()


async def test_an_account_without_the_right_is_told_so(pair: Pair, admin: Kube) -> None:
    nodes = admin.build_other("nodes", AccountTokens(admin, ("everstep-system", "everstep-nodes")))
    leases = build_leases(nodes)
    try:
        assert await leases.turn() == DENIED_SECONDS
    finally:
        await nodes.close()
    assert leases.list_silent() == {}
