"""A state with NaN or infinite values is never committed."""

from pathlib import Path

from agent.gang import Gang, assert_exact
from everstep_contract import report


async def test_a_save_on_the_way_is_refused_and_the_job_trains_on(tmp_path: Path) -> None:
    gang = Gang(tmp_path, save_every_steps=5)
    gang.stub |= {"STUB_NOT_FINITE": "10", "STUB_STEP_MS": "40"}
    async with gang:
        seen = await gang.until(lambda s: s.refused)
        assert seen.refused == "NaN or infinite values in weight"
        assert "no checkpoint of step 10: NaN or infinite values in weight" in seen.notes
        await gang.reports()
        assert not gang.seen.refused, "a later checkpoint was committed, which clears the refusal"
        assert [c.step for c in (await gang.run_log()).commits] == [5, 15, 20]
        await assert_exact(gang, 20)


async def test_the_last_save_cannot_be_left_out_so_the_job_fails(tmp_path: Path) -> None:
    gang = Gang(tmp_path, save_every_steps=5)
    gang.stub["STUB_NOT_FINITE"] = "20"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.NOT_FINITE}
        assert ends[0].message == (
            "the state after step 20 cannot be saved: NaN or infinite values in weight. The newest"
            " checkpoint is that of step 15"
        )
        run_log = await gang.run_log()
        assert (run_log.done, run_log.commits[-1].step) == (None, 15)


async def test_a_job_that_is_to_stop_with_such_a_state_fails_too(tmp_path: Path) -> None:
    gang = Gang(tmp_path, save_every_steps=5)
    steps = ",".join(map(str, range(6, 200)))
    gang.stub |= {"STUB_NOT_FINITE": steps, "STUB_UNTIL": "200", "STUB_STEP_MS": "40"}
    async with gang:
        await gang.until(lambda s: s.committed and s.step >= 6)
        gang.want(stop=gang.wanted.stop.SUSPEND)
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.NOT_FINITE}
        assert "The newest checkpoint is that of step 5" in ends[0].message
