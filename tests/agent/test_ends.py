"""Jobs that cannot continue: each agent ends with the cause and the fix."""

import errno
import os
import re
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent import agent
from everstep_agent.storage import folder
from everstep_contract import report


async def test_the_same_error_at_the_same_step_three_times_fails_the_job(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "fail:6"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.USER_ERROR}
        found = ends[0]
        assert "step 6 failed 3 times" in found.message
        assert "likely code or data" in found.message
        assert found.traceback == "T"
        run_log = await gang.run_log()
        assert [(c.cause, c.failed) for c in run_log.claims] == [
            ("Start", 0),
            ("UserError", 6),
            ("UserError", 6),
        ]


async def test_a_loss_that_is_not_finite_ends_the_job_at_once(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "nan:6"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.NOT_FINITE}
        assert gang.seen.failure is not None
        assert len((await gang.run_log()).claims) == 1


async def test_a_script_that_raises_at_once_ends_the_job_with_its_last_words(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "raise"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.SCRIPT_ERROR}
        assert "no such data set" in ends[0].message
        assert "Traceback" in ends[0].traceback


async def test_a_script_that_never_trains_is_told_what_to_write(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "silent"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.SCRIPT_ERROR}
        assert "everstep.run(main)" in ends[0].message


async def test_a_new_job_of_the_same_name_takes_the_run_and_the_former_is_fenced(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("everstep_agent.coordinator.fence.FENCE_SECONDS", 0.3)
    old = Gang(tmp_path, 2)
    old.stub["STUB_UNTIL"] = "100000"
    async with old:
        await old.until(lambda s: s.step >= 3)
        async with Gang(tmp_path, 2, uid="uid-2") as new:
            ends = await old.reports()
            assert {r.cause for r in ends.values()} == {report.Cause.FENCED}
            assert "uid-2" in ends[0].message
            await new.reports()


async def test_refuse_keeps_a_new_job_from_an_existing_run(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.reports()
    async with Gang(tmp_path, 2, uid="uid-2", if_run_exists="Refuse") as again:
        ends = await again.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.RUN_EXISTS}
        assert "checkpoint.run" in ends[0].message


@pytest.mark.parametrize("given", [0, 1])
async def test_a_job_may_have_the_name_of_a_run_that_it_was_given(
    tmp_path: Path, given: int
) -> None:
    """`kubectl everstep checkpoints restore lm --step 400 --as lm-from-400`."""
    async with Gang(tmp_path, 1, job="ns/lm", run="ns/lm-from-400") as gang:
        await gang.reports()
    new = Gang(
        tmp_path, 1, uid="uid-2", job="ns/lm-from-400", run="ns/lm-from-400", run_given=given
    )
    async with new:
        (end,) = (await new.reports()).values()
        assert end.cause is (report.Cause.DONE if given else report.Cause.RUN_EXISTS)


async def test_a_store_that_cannot_be_used_ends_the_job_at_once(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2, uri=f"file://{tmp_path}/no/such/place") as gang:
        found = await gang.tasks[0]
        assert found.cause in (report.Cause.STORE, report.Cause.CONFIG)
        assert "no/such" in found.message
        assert re.search(r"event=agent_ends .*no/such", gang.shown()), "the pod's log has it, too"


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (errno.ENOSPC, report.Cause.AGENT),
        (errno.ESTALE, report.Cause.AGENT),
        (errno.ENOTDIR, report.Cause.CONFIG),
        (errno.EINVAL, report.Cause.CONFIG),
    ],
)
async def test_a_store_that_may_be_usable_later_ends_only_this_start_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, cause: report.Cause
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(folder, "make", refuse)
    async with Gang(tmp_path, 1) as gang:
        assert (await gang.tasks[0]).cause is cause


@pytest.mark.long
async def test_a_worker_that_segfaults_in_the_same_step_again_and_again_ends_the_job(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_MODE"] = "segv:6"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.USER_ERROR}
        assert "step 6 failed 3 times with WorkerCrashed (SIGSEGV)" in ends[0].message
        assert "signal 11 (SIGSEGV)" in ends[0].message
        assert [(c.cause, c.fault) for c in (await gang.run_log()).claims] == [
            ("Start", ""), ("WorkerCrashed", "SIGSEGV"), ("WorkerCrashed", "SIGSEGV"),
        ]  # fmt: skip


async def test_four_kills_from_outside_in_the_same_step_do_not_end_the_job(tmp_path: Path) -> None:
    """The OOM killer or a failing node kills a job that makes no progress in the same step each time."""
    gang = Gang(tmp_path, 2)
    (tmp_path / "kills").mkdir()
    gang.stub["STUB_MODE"] = f"killed:6:{tmp_path}/kills:4"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [(c.cause, c.fault, c.failed) for c in claims[1:]] == [
            ("WorkerDied", "SIGKILL", 6)
        ] * 4
        await assert_exact(gang, 20)


async def test_an_ecc_error_four_times_in_the_same_step_does_not_end_the_job(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2)
    (tmp_path / "errors").mkdir()
    text = "CUDA error, uncorrectable ECC error encountered"
    gang.stub["STUB_MODE"] = f"says:6:{tmp_path}/errors:4:{text}"
    async with gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        claims = (await gang.run_log()).claims
        assert [c.cause for c in claims[1:]] == ["DeviceFailed"] * 4
        assert "double-bit error" in gang.seen.incidents[-1].message
        await assert_exact(gang, 20)


async def test_news_alone_ends_agents_that_look_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "WATCH_SECONDS", 1e6)
    monkeypatch.setattr(agent, "QUIET_WATCH_SECONDS", 1e6)
    async with Gang(tmp_path, 2) as gang:
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
