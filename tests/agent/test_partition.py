"""A network partition into two halves that both reach the store: one epoch survives."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.gang import assert_exact, die_between_two_steps
from agent.network import Network, SplitGang, routed
from everstep_contract import levels, log, report

CUT_OFF = 1


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    for module in ("breaks", "recover", "gather"):
        monkeypatch.setattr(f"everstep_agent.coordinator.{module}.SILENT_SECONDS", 2.0)
    monkeypatch.setattr("everstep_agent.coordinator.fence.FENCE_SECONDS", 0.5)
    made = Network()
    with routed(made, monkeypatch):
        yield made
    await made.close()


def addresses(gang: SplitGang, slot: int) -> set[str]:
    return {gang.agents[slot].me.address}


@pytest.mark.parametrize("least", [2, pytest.param(1, marks=pytest.mark.long)])
async def test_of_two_halves_that_reach_the_store_one_goes_on_and_the_other_is_fenced(
    tmp_path: Path, network: Network, least: int
) -> None:
    gang = SplitGang(tmp_path, 2, gang_seconds=2.0)
    # The half that continues must not finish before the other reads the log, or that one finds `done` instead.
    gang.stub |= {"STUB_STEP_MS": "80", "STUB_UNTIL": "100"}
    async with gang:
        gang.want(min_workers=least)
        await gang.until(lambda s: s.step >= 3)
        network.cut(addresses(gang, CUT_OFF))
        zombie, worker = gang.tasks.pop(CUT_OFF), gang.agents[CUT_OFF].pod.workers.current[0]
        await gang.until(lambda s: s.incidents and s.incidents[-1].open)
        gang.want(gone=(levels.SlotAttempt(slot=CUT_OFF, attempt=0),))
        await gang.start(CUT_OFF, 1)
        end = await asyncio.wait_for(zombie, 180)
        assert end.cause is report.Cause.FENCED
        # It ends because of what it finds first: the other half's claim, or its slot's next attempt.
        words = {"the claim": f"without slot {CUT_OFF}", "the attempt": "attempt 1 of slot"}
        assert sum(text in end.message for text in words.values()) == 1, end.message
        assert not worker.alive
        ends = await gang.reports()
        assert {e.cause for e in ends.values()} == {report.Cause.DONE}
        entries = (await gang.run_log()).entries
        claimed = next(i for i, e in enumerate(entries) if isinstance(e, log.Claim) and e.epoch > 1)
        assert all(e.epoch > 1 for e in entries[claimed:]), "the cut-off half wrote after the claim"
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await assert_exact(gang, 100)


@pytest.mark.long
async def test_a_member_that_reaches_all_but_the_coordinator_ends_so_that_the_others_go_on(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is healthy, so the operator does not give it up, and nobody else can prove that its workers ended."""
    monkeypatch.setattr("everstep_agent.agent.CUT_OFF_SECONDS", 1.0)
    monkeypatch.setattr("everstep_agent.peers.following.DOUBT_SECONDS", 1.0)
    gang = SplitGang(tmp_path, 3, gang_seconds=1.0)
    gang.stub |= {"STUB_STEP_MS": "80", "STUB_UNTIL": "60"}
    async with gang:
        gang.want(min_workers=2)
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        lead = gang.agents[gang.seen.coordinator.slot]
        network.cut_link(lead.me.address, gang.agents[2].me.address)
        end = await asyncio.wait_for(gang.tasks.pop(2), 120)
        assert end.cause is report.Cause.AGENT
        assert f"cannot reach the coordinator at {lead.me.address}" in end.message
        gang.want(dead=(levels.DeadAgent(slot=2, attempt=0, incarnation=1),))
        seen = await gang.until(lambda s: s.epoch > 1 and s.running)
        assert {m.slot for m in seen.members} == {0, 1}
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await gang.reports()
        await assert_exact(gang, 60)


@pytest.mark.long
async def test_a_member_that_was_away_comes_back_with_what_it_alone_holds(
    tmp_path: Path, network: Network
) -> None:
    """The link is cut longer than silence may last; meanwhile the other member loses its worker."""
    # The cut-off half commits what it holds. If the other half still waited for that save, the test would time out.
    async with SplitGang(tmp_path, 2, drain_seconds=600) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        holds = gang.seen.coordinator.slot
        await die_between_two_steps(gang, holds)
        network.cut(addresses(gang, 1 - holds))
        await gang.until(lambda s: s.incidents)
        await asyncio.sleep(8.0)  # longer than the job waits for a silent member
        assert gang.seen.epoch == 1
        network.mend()
        seen = await gang.until(lambda s: s.epoch > 1 and s.running)
        assert sum(i.steps_lost for i in seen.incidents) == 0
        assert (await gang.run_log()).claims[-1].chain[-1].last_step >= 4
        await gang.reports()
        await assert_exact(gang, 20)
