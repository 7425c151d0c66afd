"""Real ranks under real agents: a spare takes the place of a lost pod."""

import time
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep import run
from everstep_agent.pod import spawn
from everstep_contract import levels
from runtime.test_regroup_agents import a_script

SPARE = 3


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)


class GangWithSpare(Gang):
    """Three pods train, and one is a spare."""

    def __init__(self, tmp_path: Path, **settings: object) -> None:
        super().__init__(tmp_path, 4, hang_seconds=60.0, **settings)
        self.want(min_workers=3, want_workers=3, max_workers=3)

    async def until_spare(self, slot: int, attempt: int) -> None:
        spare = levels.SlotAttempt(slot=slot, attempt=attempt)
        await self.until(lambda s: s.running and len(s.members) == 3 and s.spares == (spare,))

    async def stop(self) -> None:
        await assert_exact(self, await self.suspend())


def members(seen: levels.Seen) -> list[tuple[int, int]]:
    return [(m.slot, m.attempt) for m in seen.members]


@pytest.mark.parametrize(
    "in_place", [1, pytest.param(0, marks=pytest.mark.long)], ids=["in place", "all restart"]
)
@pytest.mark.parametrize(
    "victim", [pytest.param(1, marks=pytest.mark.long), 0], ids=["a member", "the coordinator"]
)
async def test_a_spare_takes_the_place_of_a_lost_pod_whose_next_one_becomes_the_spare(
    tmp_path: Path, endless: None, victim: int, in_place: int
) -> None:
    async with GangWithSpare(tmp_path, in_place=in_place) as gang:
        await gang.until_spare(SPARE, 0)
        await gang.until(lambda s: s.step >= 5)
        assert members(gang.seen) == [(0, 0), (1, 0), (2, 0)]
        began, spare = time.monotonic(), gang.agents[SPARE].pod.workers.fresh[0].pid
        await gang.kill(victim)
        whole = [(slot, 0) for slot in range(4) if slot != victim]
        await gang.until(lambda s: s.running and members(s) == whole)
        print(f"full size {time.monotonic() - began:.2f} s after the loss of the pod")
        assert gang.worker(SPARE) == spare, "the spare's waiting worker must join"
        await gang.start(victim, 1)
        await gang.until_spare(victim, 1)
        assert members(gang.seen) == whole, "the members must not change"
        await gang.stop()
        assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0


@pytest.mark.parametrize("leaver", [SPARE, 0], ids=["the spare", "a member"])
async def test_a_spare_leaves_at_once_and_takes_the_place_of_a_member_that_leaves(
    tmp_path: Path, endless: None, leaver: int
) -> None:
    async with GangWithSpare(tmp_path, in_place=1) as gang:
        await gang.until_spare(SPARE, 0)
        await gang.until(lambda s: s.step >= 5)
        gang.want(leave=(leaver,))
        await gang.until(lambda s: [(x.slot, x.attempt) for x in s.left] == [(leaver, 0)])
        await gang.until(lambda s: s.running and len(s.members) == 3)
        await gang.until(lambda s: s.spares == ())
        assert leaver not in {m.slot for m in gang.seen.members}
        await gang.stop()


async def test_a_job_that_grows_takes_its_spare(tmp_path: Path, endless: None) -> None:
    async with GangWithSpare(tmp_path, in_place=1) as gang:
        await gang.until_spare(SPARE, 0)
        gang.want(want_workers=4, max_workers=4)
        await gang.until(lambda s: s.running and len(s.members) == 4)
        await gang.stop()
