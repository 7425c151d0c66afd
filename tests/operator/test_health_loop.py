"""The whole health loop: real exporters on loopback, a toy API server, a fake clock."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everstep_operator import kube
from everstep_operator.evidence import from_rfc3339
from everstep_operator.fleet.actions import PatchNode, Tell
from everstep_operator.fleet.marks import build_expectation
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.plan import Plan
from everstep_operator.quarantines import Quarantine
from everstep_operator.values import NodeState
from fake_exporter import an_exporter, running_exporter
from health_rig import A, B, Rig, a_page, a_rig, ports_of
from toy_cluster import ToyCluster


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with a_rig() as made:
        yield made


async def test_healthy_pages_lead_to_the_list_of_gpus_and_to_nothing_else(rig: Rig) -> None:
    await rig.rounds(5)
    assert rig.receiver.states() == {}
    assert rig.cluster.writes == ["patch nodes node-0"]
    assert rig.cluster.nodes()["node-0"].expected == (A, B)


async def test_act_one_xid_64_leads_to_leaving_and_a_cordon_in_one_round(rig: Rig) -> None:
    await rig.rounds(2)
    await rig.rounds(1, xid=64, remap=1)
    verdict = rig.receiver.verdicts["node-0"]
    assert verdict.state is NodeState.LEAVING
    assert verdict.quarantined
    assert set(verdict.marks) == {"signal", "verdict", "cordon"}
    assert rig.node()["unschedulable"] is True
    (quarantine,) = rig.cluster.quarantines()
    assert (quarantine.state, quarantine.incident) == ("Quarantined", verdict.incident)


async def test_a_page_that_names_another_node_says_nothing_about_either(rig: Rig) -> None:
    """The exporter's pod has ended, and its address belongs to the exporter of node-1 by now."""
    await rig.rounds(2, host="node-0")
    await rig.rounds(4, host="node-1", uuids=("GPU-cccc",))
    assert rig.receiver.states() == {"node-0": "unknown"}
    assert "the page of node node-1" in rig.receiver.verdicts["node-0"].message
    assert not rig.cluster.quarantines()
    assert rig.cluster.nodes()["node-0"].expected == (A, B)
    await rig.rounds(1, host="node-0")
    assert rig.receiver.states() == {}


async def test_act_two_a_gpu_that_vanishes_is_suspect_twice_and_then_gone(rig: Rig) -> None:
    await rig.rounds(2, pod="byte-lm-0-1")
    seen = []
    for _ in range(3):
        await rig.rounds(1, uuids=(B,))
        verdict = rig.receiver.verdicts["node-0"]
        seen.append((verdict.state.value, verdict.incident))
    states, incidents = zip(*seen, strict=True)
    assert states == ("suspect", "suspect", "gone")
    assert len(set(incidents)) == 1
    assert rig.receiver.verdicts["node-0"].state_of("default", "byte-lm-0-1") is NodeState.GONE
    assert rig.receiver.verdicts["node-0"].state_of("default", "byte-lm-1-1") is NodeState.LEAVING
    assert rig.node()["unschedulable"] is True


async def test_a_rank_that_dies_makes_its_node_suspect_at_once_until_a_later_page(rig: Rig) -> None:
    await rig.rounds(3)
    rig.now += 0.1
    rig.loop.rank_died("node-0")
    assert rig.receiver.states() == {"node-0": "suspect"}
    await rig.rounds(1)
    assert rig.receiver.states() == {"node-0": "suspect"}
    await rig.rounds(1)
    assert rig.receiver.states() == {}
    rig.loop.rank_died("node-1")
    assert rig.receiver.states() == {}


@pytest.mark.parametrize("mode", ["hang", "http500", "empty", "garbage"])
async def test_an_exporter_gone_silent_is_reported_and_nobody_is_cordoned(
    rig: Rig, mode: str
) -> None:
    await rig.rounds(2)
    rig.exporter.mode = mode
    await rig.rounds(3)
    assert rig.receiver.states() == {"node-0": "unknown"}
    assert not rig.receiver.verdicts["node-0"].avoided
    assert rig.cluster.quarantines() == ()
    rig.exporter.mode = "page"
    await rig.rounds(1)
    assert rig.receiver.states() == {}


async def test_an_exporter_that_still_shows_switches_but_no_gpu_is_reported_too(rig: Rig) -> None:
    await rig.rounds(2)
    rig.exporter.page = 'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="0",Hostname="x"} 41\n'
    for _ in range(100):
        rig.now += 1
        await rig.loop.scrape_once()
    await rig.passes()
    assert rig.receiver.states() == {"node-0": "unknown"}
    assert rig.cluster.quarantines() == ()
    assert 'everstep_exporter_scrapes_total{outcome="no-gpus"} 100.0' in rig.loop.render_metrics()


async def test_the_event_of_a_silence_is_there_as_long_as_the_silence(rig: Rig) -> None:
    """API servers delete Events after an hour."""
    rig.exporter.mode = "http500"
    for minutes in range(0, 180, 5):
        await rig.rounds(3)
        rig.now += 300
        rig.cluster.events = [e for e in rig.cluster.events if rig.now - written_at(e) < 3600]
        assert "ExporterSilent" in rig.cluster.reasons(), f"after {minutes} minutes"
    assert rig.cluster.reasons().count("ExporterSilent") <= 2


async def test_an_event_whose_turn_did_not_come_is_written_by_the_next_pass(rig: Rig) -> None:
    """A plan ends if the API server does not answer."""
    fleet, telling = (
        rig.loop._fleet,
        Tell(node="node-0", reason="ExporterSilent", message="since 9"),
    )
    node = rig.cluster.nodes()["node-0"]
    expectation = PatchNode(node=node, body=build_expectation(node, (A,)))
    rig.cluster.refused, rig.cluster.overloaded = {"node-0"}, True
    with pytest.raises(kube.Transient):
        await fleet.apply(Plan(actions=(expectation, telling), memory=FleetMemory()), rig.now)
    assert rig.cluster.reasons() == []
    for _ in range(2):
        await fleet.apply(Plan(actions=(telling,), memory=FleetMemory()), rig.now)
    assert rig.cluster.reasons() == ["ExporterSilent"]


def written_at(event: dict[str, Any]) -> float:
    return from_rfc3339(event["lastTimestamp"])


async def test_an_exporter_pod_that_is_gone_is_silence_as_well(rig: Rig) -> None:
    await rig.rounds(2)
    rig.cluster.pods = []
    rig.loop._exporters.list_anew()
    await rig.rounds(3)
    assert rig.receiver.states() == {"node-0": "unknown"}


async def test_an_api_server_that_refuses_every_other_list_hides_no_exporter(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporters, calls = rig.loop._exporters, itertools.count()
    cluster = type(exporters._port)
    list_all = cluster.list

    async def refuse_every_other(port: Any, *asked: Any, **more: Any) -> Any:
        if next(calls) % 2 == 0:
            raise kube.Transient(429, "TooManyRequests", "too many requests")
        return await list_all(port, *asked, **more)

    monkeypatch.setattr(cluster, "list", refuse_every_other)
    for _ in range(5):
        with contextlib.suppress(kube.KubeError):
            await rig.loop.scrape_once()
    assert exporters.count_watched(rig.loop._roster.now) == 1
    assert rig.exporter.asked == 1


async def test_known_exporters_are_read_while_the_api_server_does_not_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that a later one overwrites in the meantime would never be seen."""
    await rig.rounds(1)
    exporters, asked = rig.loop._exporters, rig.exporter.asked

    async def refuse(*_: Any, **__: Any) -> Any:
        raise kube.Transient(503, "ServiceUnavailable", "no leader")

    monkeypatch.setattr(type(exporters._port), "list", refuse)
    exporters.list_anew()
    await rig.loop.scrape_once()
    assert rig.exporter.asked == asked + 1


async def test_a_tenants_exporter_convicts_nobody_and_hides_nothing(rig: Rig) -> None:
    async with running_exporter(a_page(1, xid=79)) as tenants:
        at = {"namespace": "tenant", "ports": ports_of(tenants), "address": "127.0.0.1"}
        rig.cluster.pods += [
            an_exporter("dcgm", node="node-0", **at), an_exporter("other", node="node-1", **at),
        ]  # fmt: skip
        rig.loop._exporters.list_anew()
        await rig.rounds(3)
        assert rig.receiver.states() == {}
        assert rig.cluster.quarantines() == ()
        tenants.page = a_page(1)
        await rig.rounds(1, xid=64)
        assert rig.receiver.states() == {"node-0": "leaving"}
        assert tenants.asked == 0


async def test_two_exporters_on_a_node_make_it_unknown_with_an_event_and_nothing_else(
    rig: Rig,
) -> None:
    await rig.rounds(2)
    writes = list(rig.cluster.writes)
    at = {"ports": ports_of(rig.exporter), "address": "127.0.0.1"}
    second = an_exporter("other", node="node-0", namespace="kube-system", **at)
    rig.cluster.pods.append(second)
    rig.loop._exporters.list_anew()
    asked = rig.exporter.asked
    await rig.rounds(4, xid=64)
    assert rig.receiver.states() == {"node-0": "unknown"}
    assert not rig.receiver.verdicts["node-0"].avoided
    assert rig.cluster.reasons() == ["ExporterContested"]
    assert "gpu-operator/dcgm, kube-system/other" in rig.cluster.events[0]["message"]
    assert rig.cluster.writes == writes
    assert rig.exporter.asked == asked
    rig.cluster.pods.remove(second)
    await rig.rounds(2)
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_what_convicted_a_node_stands_while_its_exporters_contradict_each_other(
    rig: Rig,
) -> None:
    await rig.rounds(1)
    await rig.rounds(2, xid=64)
    rig.cluster.pods.append(an_exporter("other", node="node-0", namespace="kube-system"))
    rig.loop._exporters.list_anew()
    await rig.rounds(4)
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_deleting_the_quarantine_releases_and_old_evidence_does_not_come_back(
    rig: Rig,
) -> None:
    await rig.rounds(1)
    await rig.rounds(2, xid=64)
    (quarantine,) = rig.cluster.quarantines()
    deleted = rig.cluster.remove(kube.QUARANTINES, quarantine.name)
    rig.loop.quarantine_deleted(deleted)
    await rig.rounds(3)
    assert not rig.node().get("unschedulable")
    assert rig.receiver.states() == {}
    rig.restart()
    await rig.rounds(3)
    assert rig.receiver.states() == {}
    await rig.rounds(1, xid=0)
    await rig.rounds(1, xid=64)
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_a_gpu_that_was_taken_out_convicts_no_later_boot(rig: Rig) -> None:
    await rig.rounds(2)
    await rig.rounds(3, uuids=(B,))
    (quarantine,) = rig.cluster.quarantines()
    rig.loop.quarantine_deleted(rig.cluster.remove(kube.QUARANTINES, quarantine.name))
    await rig.rounds(3)
    assert rig.receiver.states() == {}
    rig.cluster.change_node("node-0", {"status": {"nodeInfo": {"bootID": "boot-2"}}})
    await rig.rounds(4)
    assert rig.receiver.states() == {}
    await rig.rounds(1, uuids=(A, B))
    await rig.rounds(3, uuids=(B,))
    assert rig.receiver.states() == {"node-0": "gone"}, "it was back, and is lost again"


async def test_a_standby_that_takes_over_publishes_nothing_of_what_its_leader_has_released(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies between the new leader's first list and its first plan."""
    await rig.rounds(1)
    await rig.rounds(2, xid=64)
    (released,) = rig.cluster.quarantines()
    deleted = rig.cluster.remove(kube.QUARANTINES, released.name)
    rig.loop.quarantine_deleted(deleted)
    await rig.rounds(3)
    await rig.loop.close()
    rig.restart()
    rig.loop.quarantine_deleted(deleted)
    lists, said = rig.loop._fleet._list, list[dict[str, str]]()

    async def a_rank_dies_after_the_list() -> tuple[
        tuple[Quarantine, ...] | None, dict[str, str], str
    ]:
        found = await lists()
        rig.loop.rank_died("node-0")
        said.append(rig.receiver.states())
        return found

    monkeypatch.setattr(rig.loop._fleet, "_list", a_rank_dies_after_the_list)
    await rig.rounds(1)
    assert said == [{}]
    assert rig.receiver.states()["node-0"] == "suspect"


async def test_a_restarted_operator_says_the_same_of_the_same_incident(rig: Rig) -> None:
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    before = rig.receiver.verdicts["node-0"]
    writes = len(rig.cluster.writes)
    rig.restart()
    await rig.rounds(3)
    after = rig.receiver.verdicts["node-0"]
    assert (after.incident, after.state, after.marks) == (
        before.incident,
        before.state,
        before.marks,
    )
    assert len(rig.cluster.writes) == writes


@pytest.mark.parametrize("marked_only", [False, True], ids=["object", "mark-on-the-node"])
async def test_a_new_leader_under_a_gone_quarantine_spares_the_neighbours(
    rig: Rig, marked_only: bool
) -> None:
    """Only pages that the new leader has not seen tell which pod held the lost GPU."""
    await rig.rounds(2, pod="byte-lm-0-1")
    await rig.rounds(3, uuids=(B,))
    before = rig.receiver.verdicts["node-0"]
    if marked_only:
        (quarantine,) = rig.cluster.quarantines()
        rig.cluster.remove(kube.QUARANTINES, quarantine.name)
    rig.restart()
    for _ in range(5):
        await rig.rounds(1)
        after = rig.receiver.verdicts["node-0"]
        assert after.state_of("default", "byte-lm-0-1") is NodeState.GONE
        assert after.state_of("default", "byte-lm-1-1") is NodeState.LEAVING
        assert after.incident == before.incident


async def test_a_gpu_that_vanished_while_nobody_looked_spares_who_holds_another(rig: Rig) -> None:
    await rig.rounds(2)
    rig.restart()
    await rig.rounds(3, uuids=(B,), pod="byte-lm-1-1")
    verdict = rig.receiver.verdicts["node-0"]
    assert verdict.state_of("default", "byte-lm-0-1") is NodeState.GONE
    assert verdict.state_of("default", "byte-lm-1-1") is NodeState.LEAVING
    rig.restart()
    await rig.rounds(1, uuids=(B,))
    verdict = rig.receiver.verdicts["node-0"]
    assert verdict.state_of("default", "byte-lm-1-1") is NodeState.LEAVING


async def test_without_the_crd_a_new_leader_heeds_the_mark_on_the_node(rig: Rig) -> None:
    await rig.rounds(2, pod="byte-lm-0-1")
    await rig.rounds(3, uuids=(B,))
    rig.cluster.crd = "missing"
    rig.restart()
    await rig.rounds(1)
    verdict = rig.receiver.verdicts["node-0"]
    assert verdict.state_of("default", "byte-lm-0-1") is NodeState.GONE
    assert verdict.state_of("default", "byte-lm-1-1") is NodeState.LEAVING


async def test_a_new_leader_that_cannot_list_quarantines_publishes_nothing_yet(rig: Rig) -> None:
    """An empty list of verdicts would call back every pod that is leaving."""
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    rig.restart()
    rig.receiver.verdicts = {"sentinel": rig.receiver.verdicts["node-0"]}
    rig.cluster.refuses_lists = True
    await rig.rounds(1, xid=0)
    assert set(rig.receiver.verdicts) == {"sentinel"}
    (told,) = (e["message"] for e in rig.cluster.events if e["reason"] == "QuarantinesUnreadable")
    assert "jobs get no verdicts, and no pods are created" in told
    rig.cluster.refuses_lists = False
    await rig.rounds(1)
    assert rig.receiver.states() == {"node-0": "leaving"}


async def test_without_the_crd_jobs_still_hear_the_verdict(rig: Rig) -> None:
    rig.cluster.crd = "missing"
    await rig.rounds(1)
    await rig.rounds(3, xid=64)
    assert rig.receiver.states() == {"node-0": "leaving"}
    assert not rig.node()["unschedulable"]
    assert rig.cluster.reasons() == ["QuarantinesUnreadable"]
    assert "Verdicts still reach the jobs" in rig.cluster.events[0]["message"]


async def test_the_running_loop_scrapes_by_itself_and_stops_when_cancelled(rig: Rig) -> None:
    rig.exporter.page = a_page(1, xid=95)
    task = asyncio.create_task(rig.loop.run())
    async with asyncio.timeout(20):
        await rig.receiver.spoken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.receiver.states() == {"node-0": "leaving"}


JOB, OTHER = ("team", "lm"), ("team", "other")


@pytest.mark.parametrize(
    ("told", "suspect"),
    [
        ({JOB: {"node-1": 2}}, {"node-1"}),
        ({JOB: {"node-1": 1}}, set()),
        ({JOB: {"node-1": 1}, OTHER: {"node-1": 1}}, {"node-1"}),
        ({JOB: {"node-1": 2, "node-2": 2, "node-3": 2, "node-0": 2}}, set()),
        ({JOB: {"no-such-node": 2}}, set()),
    ],
)
async def test_pods_of_two_slots_that_did_not_start_make_the_node_suspect_and_no_more(
    rig: Rig, told: dict[tuple[str, str], dict[str, int]], suspect: set[str]
) -> None:
    """node-1 has no exporter: only its pods give signals about it."""
    await rig.rounds(1)
    for job, nodes in told.items():
        rig.loop.starts_failed(job, nodes)
    await rig.rounds(3)
    assert rig.receiver.states() == dict.fromkeys(suspect, "suspect")
    assert {v.reason for v in rig.receiver.verdicts.values()} <= {"PodsFailToStart"}
    assert rig.cluster.quarantines() == ()
    for job in told:
        rig.loop.starts_failed(job, {})
    await rig.rounds(1)
    assert rig.receiver.states() == {}


async def test_the_time_of_the_last_judged_sample_is_published_with_the_verdicts(rig: Rig) -> None:
    """It is the monotonic time of the last page before the one on which the energy had changed."""
    begun = time.monotonic()
    await rig.rounds(1)
    assert rig.receiver.judged_at == {}
    first = time.monotonic()
    await rig.rounds(1, xid=64)
    assert rig.receiver.states() == {"node-0": "leaving"}
    assert begun <= rig.receiver.judged_at["node-0"] <= first
    before = rig.receiver.judged_at["node-0"]
    rig.exporter.mode = "http500"
    await rig.rounds(2)
    assert rig.receiver.judged_at["node-0"] == before


async def test_what_is_remembered_of_a_node_goes_with_the_node(rig: Rig) -> None:
    await rig.rounds(2)
    rig.loop.rank_died("node-0")
    rig.cluster.remove(kube.NODES, "node-0")
    await rig.rounds(2)
    examiner = rig.loop._examiner
    assert (examiner.memories, examiner._died_at, examiner._found) == ({}, {}, {})
    assert (examiner._telling, examiner.judged_at) == (set(), {})
    assert rig.loop._roster.now.nodes.keys() == {"node-1"}


async def test_the_time_of_a_verdict_goes_with_the_verdict(rig: Rig) -> None:
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    assert len(rig.loop._publisher._decided_at) == 1
    await rig.rounds(1, xid=0)
    (quarantine,) = rig.cluster.quarantines()
    rig.loop.quarantine_deleted(rig.cluster.remove(kube.QUARANTINES, quarantine.name))
    await rig.rounds(3)
    assert rig.loop._publisher._decided_at == {}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_quarantine_that_an_edit_made_unreadable_stays_in_force(
    rig: Rig, restarted: bool
) -> None:
    await rig.rounds(1)
    await rig.rounds(2, xid=64)
    (quarantine,) = rig.cluster.quarantines()
    edited = rig.cluster.remove(kube.QUARANTINES, quarantine.name)
    edited["spec"]["decidedAt"] = "2024-12-31t23:59:59z"  # the CRD accepts it
    rig.cluster.add(kube.QUARANTINES, edited)
    rig.cluster.writes.clear()
    if restarted:
        rig.restart()
    await rig.rounds(4)
    assert rig.node()["unschedulable"] is True
    assert rig.receiver.states() == {"node-0": "leaving"}
    assert rig.cluster.writes == []
    if restarted:
        assert "CreateQuarantine" not in rig.loop.render_metrics(), "it exists"
        return
    rig.cluster.remove(kube.QUARANTINES, quarantine.name)
    await rig.rounds(3)
    assert not rig.node().get("unschedulable")


async def test_words_about_a_quarantine_go_with_it(rig: Rig) -> None:
    rig.cluster.add(kube.QUARANTINES, {"metadata": {"name": "broken"}, "spec": {}})
    await rig.rounds(1)
    assert "quarantine broken" in rig.loop._said._said
    rig.cluster.remove(kube.QUARANTINES, "broken")
    await rig.rounds(1)
    assert rig.loop._said._said.keys() <= {"exporters that are not accepted"}


async def test_the_metrics_tell_of_scrapes_verdicts_and_the_budget(rig: Rig) -> None:
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    text = rig.loop.render_metrics()
    assert 'everstep_exporter_scrapes_total{outcome="ok"} 2.0' in text
    assert 'everstep_node_verdicts{state="leaving"} 1.0' in text
    assert 'everstep_quarantines{state="Quarantined"} 1.0' in text
    assert "everstep_quarantine_budget 2.0" in text


async def test_quarantines_that_cannot_be_listed_are_not_gone_from_the_metrics(rig: Rig) -> None:
    """The alert on quarantined nodes would end, and fire anew once the API server answers again."""
    await rig.rounds(1)
    await rig.rounds(1, xid=64)
    rig.cluster.refuses_lists = True
    await rig.rounds(1)
    assert 'everstep_quarantines{state="Quarantined"} 1.0' in rig.loop.render_metrics()


async def test_a_namespace_whose_pods_may_not_be_listed_hides_no_exporter_elsewhere(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, denied = ToyCluster.list, {"kube-system"}

    async def list_allowed(
        cluster: ToyCluster, kind: kube.Kind, namespace: str | None = None, **given: Any
    ) -> Any:
        if kind == kube.PODS and namespace in denied:
            raise kube.Denied(403, "Forbidden", f"cannot list pods in {namespace}")
        return await listed(cluster, kind, namespace, **given)

    monkeypatch.setattr(ToyCluster, "list", list_allowed)
    await rig.rounds(2, xid=79)
    assert rig.receiver.states() == {"node-0": "leaving"}
    denied |= {"gpu-operator"}
    judged_at = rig.receiver.judged_at["node-0"]
    await rig.rounds(2)
    assert rig.receiver.judged_at["node-0"] > judged_at, "the known exporter is still read"
    denied |= {"gpu-operator", "nvidia-gpu-operator", "gke-managed-system"}
    await rig.loop.close()
    rig.restart()
    with pytest.raises(kube.Denied):
        await rig.loop.scrape_once()
