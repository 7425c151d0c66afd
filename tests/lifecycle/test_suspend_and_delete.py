"""Suspend, resume and delete at unfavorable moments."""

import asyncio

import pytest

from everstep_demo.board import condition, is_true
from lifecycle.scene import LIMIT, Scene, until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


async def suspend(scene: Scene, name: str, *, on: bool) -> None:
    await scene.board.patch(name, {"spec": {"suspend": on}})


@pytest.mark.long
async def test_suspend_in_the_middle_of_a_recovery_saves_and_the_job_resumes_from_there(
    scene: Scene,
) -> None:
    trial = await scene.start("middle")
    await scene.stepping(trial)
    pod = await scene.board.current_pod("middle", 1)
    assert pod is not None
    await scene.board.delete_pod(pod.name)

    async def recovers() -> bool:
        return is_true(await trial.job(), "Recovering")

    await trial.until("the recovery", recovers, limit=LIMIT)
    before = await trial.step()
    await suspend(scene, "middle", on=True)
    await scene.condition(trial, "Suspended")
    assert await scene.board.pods("middle") == []
    await trial.watch.refresh()
    assert trial.watch.committed >= before, "the job must save although it is recovering"
    await suspend(scene, "middle", on=False)
    await scene.stepping(trial)
    await scene.further(trial, trial.watch.committed)
    entries = await trial.watch.ledger()
    assert [e.step for e in entries] == list(range(1, len(entries) + 1))
    assert not is_true(await trial.job(), "Suspended")


@pytest.mark.long
async def test_suspend_resume_suspend_within_a_second_ends_suspended(scene: Scene) -> None:
    trial = await scene.start("undecided")
    await scene.stepping(trial)
    for on in (True, False, True):
        await suspend(scene, "undecided", on=on)
        await asyncio.sleep(0.3)
    await scene.condition(trial, "Suspended")
    await until("no pod is left", lambda: _empty(scene, "undecided"))
    await asyncio.sleep(3.0)
    assert await _empty(scene, "undecided")
    restarts = (await trial.job())["status"].get("restarts") or {"total": 0}
    assert restarts["total"] == 0, f"a suspension is no failure: {restarts}"


async def _empty(scene: Scene, name: str) -> bool:
    return not await scene.board.pods(name)


@pytest.mark.long
async def test_deleted_at_any_moment_it_leaves_nothing(scene: Scene) -> None:
    async def at_once(name: str) -> None:
        await scene.start(name)

    async def with_pods(name: str) -> None:
        await scene.start(name, replicas=1)
        await until(f"pods of {name}", lambda: scene.board.pods(name))

    async def stepping(name: str) -> None:
        await scene.stepping(await scene.start(name, replicas=1))

    async def suspended(name: str) -> None:
        trial = await scene.start(name, replicas=1, spec={"suspend": True})
        await scene.condition(trial, "Suspended")

    async def suspending(name: str) -> None:
        await stepping(name)
        await suspend(scene, name, on=True)

    async def finished(name: str) -> None:
        trial = await scene.start(name, replicas=1, until=5)
        await scene.condition(trial, "Complete")

    for moment in (at_once, with_pods, stepping, suspended, suspending, finished):
        name = f"gone-{moment.__name__.replace('_', '-')}"
        await moment(name)
        await scene.board.delete(name)
        await scene.nothing_left(name)


@pytest.mark.long
async def test_deleted_and_applied_again_it_goes_on_with_its_run(scene: Scene) -> None:
    trial = await scene.start("again")
    await scene.stepping(trial)
    await trial.until("a commit", lambda: _commits(trial, 50), limit=LIMIT)
    await scene.board.delete("again")
    await scene.nothing_left("again")
    trial = await scene.start("again")
    await scene.stepping(trial)
    await scene.further(trial, 50)
    log = await trial.watch.ledger()
    assert [e.step for e in log] == list(range(1, len(log) + 1))
    assert all(count == 1 for e in log for count in e.counts)


async def _commits(trial: object, step: int) -> bool:
    await trial.watch.refresh()  # type: ignore[attr-defined]
    return trial.watch.committed >= step  # type: ignore[attr-defined, no-any-return]


@pytest.mark.long
async def test_of_two_jobs_with_one_run_the_newer_takes_over_and_the_older_names_it(
    scene: Scene,
) -> None:
    older = await scene.start("older", run="shared-by-hand")
    await scene.stepping(older)
    newer = await scene.start("newer", run="shared-by-hand")
    failed = await scene.condition(older, "Failed")
    assert failed["reason"] == "Fenced"
    assert "default/newer" in failed["message"]
    await newer.watch.refresh()
    epoch = newer.watch.epoch
    await scene.further(newer)
    status = (await older.job())["status"]
    assert (status.get("restarts") or {}).get("byCause", {}).get("PodFenced", 0) <= 1, status
    await newer.watch.refresh()
    assert newer.watch.epoch == epoch, "the older job must stop claiming epochs"


@pytest.mark.long
async def test_refuse_keeps_a_job_from_a_run_that_exists(scene: Scene) -> None:
    first = await scene.start("first", replicas=1, until=5, run="taken")
    await scene.condition(first, "Complete")
    checkpoint = {"uri": "s3://everstep/tests", "everySteps": 50, "ifRunExists": "Refuse"}
    second = await scene.start("second", replicas=1, spec={"checkpoint": checkpoint}, run="taken")
    failed = await scene.condition(second, "Failed")
    assert failed["reason"] == "RunExists", failed
    assert "taken" in failed["message"]
    running = condition(await second.job(), "Running")
    assert running is not None
    assert running["status"] == "False"
