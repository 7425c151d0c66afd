"""A save that was given up: the last one is repeated, any other is reported."""

import struct
from pathlib import Path

from agent.gang import Gang, assert_exact
from agent.stub_worker import values_after
from everstep_agent.checkpoint.digest import compute as digest_of
from everstep_agent.runlog.run_log import RunLog
from everstep_contract import report
from everstep_contract.log import Retire

UNTIL = 20


def share_of(step: int, claim: str) -> str:
    """Return the key of the chunk that the first of two stub workers stores: half of the four numbers."""
    digest = digest_of(struct.pack("<2d", *values_after(step)[:2]))
    return f"chunks/{claim[:8]}/{step:010d}/{digest}"


async def retire_shares(log: RunLog, *steps: int) -> None:
    """Act as a coordinator that deletes the chunks of these steps before their commit."""
    await log.refresh()
    claim = log.newest_claim
    assert claim is not None
    keys = tuple(share_of(step, claim.token) for step in steps)
    await log.append(Retire(epoch=claim.epoch, token=claim.token, chunks=keys))


async def test_a_last_save_that_is_given_up_is_taken_again(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_STEP_MS"] = "50"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        await retire_shares(await gang.run_log(), UNTIL)
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        lost = gang.seen.incidents[-1]
        assert (lost.cause, lost.steps_lost, lost.open) == ("SaveLost", 0, False)
        assert "retired meanwhile" in lost.message
        assert [c.epoch for c in (await gang.run_log()).claims] == [1], (
            "the save needs no new epoch"
        )
        await assert_exact(gang, UNTIL)


async def test_a_save_before_leaving_that_is_given_up_is_taken_again(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_STEP_MS"] = "200"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        await retire_shares(await gang.run_log(), *range(1, UNTIL))
        gang.want(leave=(1,), incident="inc-1")
        seen = await gang.until(lambda s: s.left, 60)
        assert seen.left[0].step > 0
        assert seen.left[0].step == seen.committed.step


async def test_a_save_on_the_way_that_is_given_up_is_said_and_the_next_is_taken(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=5)
    gang.stub["STUB_STEP_MS"] = "50"
    async with gang:
        await gang.until(lambda s: s.step >= 1)
        await retire_shares(await gang.run_log(), 5)
        await gang.until(lambda s: s.committed is not None and s.committed.step == 10)
        assert any("step 5" in n and "retired meanwhile" in n for n in gang.seen.notes)
        await gang.reports()
        steps = [c.step for c in (await gang.run_log()).commits]
        assert 5 not in steps
        assert steps[-1] == UNTIL
