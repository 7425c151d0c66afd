"""`job.stop` ends the training with the step in which it is called."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from agent.given import an_epoch, stepping
from everstep import Job, run
from everstep.errors import Misuse
from everstep.transfer import Taken
from everstep_agent.coordinator.unlike_ends import describe_unlike_ends
from everstep_agent.peers.agent_report import State
from everstep_agent.pod import spawn
from everstep_contract import report, wire
from everstep_contract.sums import Sums
from runtime import a_paced_script
from runtime.a_commit import commit
from runtime.a_job import Trial


def test_the_loop_ends_after_the_step_and_that_step_is_saved(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    taken = []
    for step in trial.job.steps(until=9):
        if step.number == 3:
            trial.job.stop()
            trial.job.stop()
        trial.take(step)
        taken.append(step.number)
    trial.session.saves.copier.wait()
    assert taken == [1, 2, 3]
    assert [s.step for s in trial.agent.of(wire.Staged)] == [3]
    assert [s.step for s in trial.agent.of(wire.Stops)] == [3]
    assert trial.session.finished


def test_outside_of_a_step_it_is_refused(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    with pytest.raises(Misuse, match="inside the loop"):
        trial.job.stop()


@pytest.mark.parametrize(("name", "further"), [("ns/run", []), ("ns/fork", [3, 4])])
def test_the_run_stays_ended_and_a_fork_of_it_goes_on(
    tmp_path: Path, name: str, further: list[int]
) -> None:
    first = Trial(tmp_path, run="ns/run").track()
    for step in first.job.steps(until=9):
        first.take(step)
        if step.number == 2:
            first.job.stop()
    first.session.saves.copier.wait()
    (staged,) = first.agent.of(wire.Staged)
    folder = tmp_path / "again"
    folder.mkdir()
    again = Trial(folder, run=name, **commit(folder, [staged])).track()
    taken = []
    for step in again.job.steps(until=4):
        again.take(step)
        taken.append(step.number)
    assert taken == further


def test_the_state_does_not_depend_on_the_name_of_the_run(tmp_path: Path) -> None:
    """`make demo` compares the checkpoints of two runs."""
    assert a_saved_state(tmp_path / "one", "ns/one") == a_saved_state(tmp_path / "two", "ns/two")


def a_saved_state(folder: Path, run: str) -> dict[str, Any] | None:
    folder.mkdir()
    trial = Trial(folder, run=run).track()
    for step in trial.job.steps(until=2):
        trial.take(step)
    trial.session.saves.copier.wait()
    (staged,) = trial.agent.of(wire.Staged)
    assert staged.state
    return staged.state


def test_a_rank_that_joins_after_the_last_step_takes_no_further_one(
    a_trial: Callable[..., Trial],
) -> None:
    member, newcomer = a_trial().track(), a_trial().track()
    for step in member.job.steps(until=9):
        member.take(step)
        if step.number == 2:
            member.job.stop()
    held = member.session.capture()
    newcomer.session.settle(9)
    taken = Taken(applied=2, tree=held.tree, tensors=held.tensors, parts=frozenset())
    newcomer.session.adopt(taken)
    assert newcomer.session.reached_end
    assert [s.step for s in newcomer.agent.of(wire.Stops)] == [2]


SUM = Sums(step=6, reduction=0, buckets=1, joined=2, complete=0)


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"state": State.FINISHED}, False),
        ({"sums": None}, False),  # it waits for its last save
        ({"applied": 4}, False),  # the sum is complete, and this rank has not noticed yet
    ],
)
def test_a_rank_that_waits_for_one_that_has_ended_is_named(
    changes: dict[str, object], is_said: bool
) -> None:
    ended = stepping(0, state=State.FINISHED)
    waits = stepping(1, **({"waiting": True, "sums": SUM} | changes))
    said = describe_unlike_ends(an_epoch(), [ended, waits])
    assert is_said == ("rank 0 has ended after step 5, and rank 1 waits for it" in said)


UNTIL, STOP = 40, 6


def a_script(job: Job, ranks: tuple[int, ...]) -> None:
    def stop(step: int) -> None:
        if step == STOP and job.rank in ranks:
            job.stop()

    a_paced_script.main(job, UNTIL, stop)


async def trained(gang: Gang, monkeypatch: pytest.MonkeyPatch, *ranks: int) -> report.ExitReport:
    forked = spawn.ForkSpawner(lambda: run(partial(a_script, ranks=ranks), seed=2))
    monkeypatch.setattr("agent.gang.fork_script", lambda script: forked)
    async with gang:
        ends = await gang.reports()
        if len(ranks) == gang.count:
            await assert_exact(gang, STOP)
        return ends[0]


async def test_a_job_whose_ranks_all_stop_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await trained(Gang(tmp_path, 2), monkeypatch, 0, 1)
    assert (found.cause, found.step) == (report.Cause.DONE, STOP)


async def test_a_job_of_which_one_rank_stops_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(60):
        found = await trained(Gang(tmp_path, 2), monkeypatch, 1)
    assert found.cause is report.Cause.MISUSE
    assert "the script of rank 1 has ended after step 6, and rank 0 waits for it" in found.message
