"""Claims that a coordinator's term appends to a real log: of an epoch that continues the running one, and of one of
new processes.
"""

import asyncio
from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.a_term import a_term
from agent.given import a_claim, a_report, an_epoch, ended, wanting
from everstep_agent.coordinator import regroup
from everstep_agent.coordinator.coordinator import Coordinator
from everstep_agent.coordinator.gather import gather
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.group_store import GroupStore
from everstep_contract import log, report

EPOCH = an_epoch(3)
FIRST = a_claim(1, token=EPOCH.token, members=tuple(i for m in EPOCH.members for i in m.ids()))
COMMIT = log.Commit(epoch=1, token=EPOCH.token, step=5, manifest="m", digest="d")


async def a_term_that_has_lost_slot_2() -> Term:
    term = a_term(wanting(3))
    assert await term.run_log.append(FIRST)
    term.change(term.state.begin_epoch(EPOCH).propose(2, "next"))
    term.take(a_report(2, ended=ended(1)))
    return term


async def claim(term: Term, meanwhile: log.Entry) -> log.Claim | str:
    """The claim, or why there is none, if this entry is appended after the log was read."""
    claiming = asyncio.create_task(regroup.claim(term, EPOCH.members[:2], 5, "WorkerDied"))
    await asyncio.sleep(0)  # it has begun to read
    await term.run_log.append(meanwhile)
    return await claiming


async def test_a_commit_that_was_under_way_does_not_prevent_the_claim() -> None:
    term = await a_term_that_has_lost_slot_2()
    found = await claim(term, COMMIT)
    assert isinstance(found, log.Claim), found
    assert list(term.run_log.entries) == [FIRST, COMMIT, found]
    await term.close()


async def test_another_claim_does() -> None:
    term = await a_term_that_has_lost_slot_2()
    found = await claim(term, a_claim(2, members=FIRST.members[1:], token="rival"))
    assert isinstance(found, str)
    assert term.state.burnt == 2, "the number is not used again"
    await term.close()


async def test_a_claim_names_the_workers_that_are_ready_when_the_log_has_been_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may have been away for long."""
    term = a_term(wanting(2))
    refresh = term.run_log.refresh

    async def refresh_late() -> tuple[log.Entry, ...]:
        term.take(a_report(1, fresh=(2,), ended=ended(1)))
        return await refresh()

    monkeypatch.setattr(term.run_log, "refresh", refresh_late)
    gathering = asyncio.create_task(gather(term, "Start"))
    await asyncio.sleep(0)
    assert term.state.round == 1
    for slot in range(2):
        term.take(a_report(slot))
    epoch = await asyncio.wait_for(gathering, 10)
    assert epoch is not None
    assert [m.lives for m in epoch.members] == [(1,), (2,)]
    await term.close()


async def test_a_run_none_of_whose_checkpoints_can_be_read_does_not_begin_again_at_step_0(
    tmp_path: Path,
) -> None:
    """Perhaps an older version of Everstep cannot read them: the run is left as it is."""
    term = a_term(wanting(1), job="default/job", run="default/job")
    run = ARun(term.context.store, tmp_path)
    await run.claim(1, job_uid="former")
    for step in (2, 4):
        await run.save(step)
    for commit in run.log.commits:
        await run.store.put(commit.manifest, b"{}")
    coordinator = Coordinator(term.context, None, wanting(1), GroupStore())
    await coordinator._open()
    gathering = asyncio.create_task(gather(coordinator.term, "Start"))
    await asyncio.sleep(0)
    coordinator.term.take(a_report(0, joined=coordinator.term.state.round))
    assert await asyncio.wait_for(gathering, 10) is None
    end = coordinator.term.state.end
    assert end
    assert end.cause == report.Cause.STORE.value
    newest = run.log.commits[-1].manifest
    assert f"none of the run's checkpoints can be read: {newest} was changed" in end.message
    assert await run.log.refresh() == (), "no claim gives up a checkpoint"
    await coordinator.close()
