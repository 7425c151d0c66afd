"""No second of an agent is counted twice when the coordinator changes."""

import time
from dataclasses import replace
from pathlib import Path

from agent.gang import Gang
from agent.given import a_report
from everstep_agent.coordinator.spent_time import SpentTime, read_spent_time
from everstep_contract.manifest import Manifest


def told(slot: int, step: float, **changes: object):
    return a_report(slot, seconds={"step": step}, **changes)


def written(spent: SpentTime) -> Manifest:
    return Manifest(
        run="r", epoch=1, step=1, writer="w", world=1,
        seconds=spent.total(), agents=spent.list_agents(),
    )  # fmt: skip


def test_an_agent_that_outlives_its_coordinator_counts_once() -> None:
    first = SpentTime().update([told(0, 10.0), told(1, 12.0)])
    heir = read_spent_time(written(first), same_job=True)
    assert heir.total() == {"step": 22.0}, "the sum before the first report"
    assert heir.update([told(1, 15.0)]).total() == {"step": 25.0}
    assert heir.update([told(0, 11.0), told(1, 15.0)]).total() == {"step": 26.0}


def test_what_a_life_that_is_over_has_spent_stays() -> None:
    first = SpentTime().update([told(0, 10.0), told(1, 12.0)])
    first = first.update([told(1, 3.0, incarnation=2)])
    assert first.total() == {"step": 25.0}
    heir = read_spent_time(written(first), same_job=True)
    assert heir.update([told(0, 10.0), told(1, 4.0, incarnation=2)]).total() == {"step": 26.0}
    again = heir.update([told(1, 12.0)])
    assert again.total() == {"step": 25.0}, "the older life, reported late, must not count twice"


def test_another_jobs_agents_report_no_more() -> None:
    first = SpentTime().update([told(0, 10.0)])
    next_job = read_spent_time(written(first), same_job=False).update([told(0, 2.0)])
    assert next_job.total() == {"step": 12.0}


def test_a_checkpoint_without_the_agents_figures_is_read() -> None:
    old = replace(written(SpentTime().update([told(0, 10.0)])), agents=())
    assert read_spent_time(old, same_job=True).total() == {"step": 10.0}


async def test_a_takeover_does_not_count_the_living_agents_seconds_twice(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 3, save_every_steps=2)
    gang.stub.update(STUB_STEP_MS="100", STUB_UNTIL="60")
    began = time.monotonic()
    async with gang:
        seen = await gang.until(lambda s: s.committed is not None and s.committed.step >= 30)
        assert seen.coordinator is not None
        lost = seen.coordinator.slot
        await gang.kill(lost)
        await gang.start(lost, 1)
        epoch = seen.epoch
        seen = await gang.until(
            lambda s: s.coordinator is not None and s.coordinator.slot != lost
            and s.epoch > epoch and len(s.members) == 3 and s.running
        )  # fmt: skip
        # Before the loss each rank stepped for 3 s or more. A sum that counts two of them twice
        # exceeds the clock, because the fourth agent started only after the third had died.
        ranks = 3 * (time.monotonic() - began)
        assert sum(seen.seconds.values()) <= ranks
