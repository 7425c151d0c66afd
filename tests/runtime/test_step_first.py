"""Real ranks under real agents: the survivors of a proven loss step before their claim is in the log."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from agent.unreliable import UnreliableStore
from everstep import run
from everstep_agent import agent
from everstep_agent.coordinator import fence, join
from everstep_agent.pod import spawn
from everstep_agent.storage import opening
from everstep_agent.storage.errors import Denied, Unreachable
from everstep_agent.storage.retrying import Patience, Retrying
from runtime.test_regroup_agents import a_script


class Log(UnreliableStore):
    """A store that refuses all writes while `denied`, refuses log entries while `full`, and delays
    entries and reads until `answers` is set.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.full = self.denied = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def create(self, key: str, body: bytes | memoryview) -> None:
        await self.answers.wait()
        if self.full and key.startswith("log/"):
            raise Unreachable(f"{key}: the store does not answer")
        await super().create(key, body)

    async def _write(self, verb: str, key: str, body: bytes | memoryview) -> None:
        if self.denied:
            raise Denied(f"{key}: 403")
        await super()._write(verb, key, body)

    async def get(self, key: str) -> bytes:
        await self.answers.wait()
        return await super().get(key)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Log]:
    """The stores of all agents. A failing call is given up after 0.2 s."""
    found: list[Log] = []

    def open_impatient(*given: Any) -> Retrying:
        found.append(Log(opening.open_raw(*given)))
        return Retrying(found[-1], Patience(deadline_s=0.2))

    monkeypatch.setattr(agent, "open_store", open_impatient)
    monkeypatch.setattr(fence, "FENCE_SECONDS", 0.1)
    spawner = spawn.ForkSpawner(lambda: run(lambda job: a_script(job, 10**6), seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    return found


async def steps_on(gang: Gang, slots: list[int], steps: int = 5) -> None:
    """Wait until exactly these slots have taken more steps together."""
    await gang.until(lambda s: s.running and [m.slot for m in s.members] == slots)
    since = gang.seen.step
    await gang.until(lambda s: s.step >= since + steps and [m.slot for m in s.members] == slots)


async def stop(gang: Gang) -> None:
    stopped = await gang.suspend()
    assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0
    await assert_exact(gang, stopped)


async def list_sizes(gang: Gang) -> list[int]:
    return [len(c.members) for c in (await gang.run_log()).claims]


async def test_while_the_store_is_away_two_losses_cost_no_wait_and_are_claimed_later(
    tmp_path: Path, stores: list[Log]
) -> None:
    async with Gang(tmp_path, 4, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        for store in stores:
            store.away = True
        os.kill(gang.worker(2), signal.SIGKILL)
        await steps_on(gang, [0, 1, 3])
        os.kill(gang.worker(3), signal.SIGKILL)
        await steps_on(gang, [0, 1], 20)
        assert gang.seen.storage_error is not None
        assert await list_sizes(gang) == [4]
        for store in stores:
            store.away = False
        await gang.until(lambda s: s.running and len(s.members) == 4)
        assert (await list_sizes(gang))[:3] == [4, 3, 2]
        await stop(gang)


async def test_a_store_that_is_slow_does_not_delay_the_survivors_next_step(
    tmp_path: Path, stores: list[Log]
) -> None:
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        for store in stores:
            store.answers.clear()
        os.kill(gang.worker(2), signal.SIGKILL)
        await steps_on(gang, [0, 1])
        for store in stores:
            store.answers.set()
        await gang.until(lambda s: s.running and len(s.members) == 3)
        assert (await list_sizes(gang))[:3] == [3, 2, 3]
        await stop(gang)


@pytest.mark.parametrize(
    "victim", [0, pytest.param(2, marks=pytest.mark.long)], ids=["its own rank", "another rank"]
)
async def test_a_successor_claims_what_the_lost_coordinator_had_not_claimed_yet(
    tmp_path: Path, stores: list[Log], victim: int
) -> None:
    """Slot 0 coordinates. The next coordinator can read the log at once, but write to it only later."""
    survivors = [slot for slot in range(3) if slot != victim]
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        assert gang.seen.coordinator.slot == 0
        for store in stores:
            store.full = True
        os.kill(gang.worker(victim), signal.SIGKILL)
        await steps_on(gang, survivors)
        await gang.kill(0)
        await gang.until(lambda s: s.coordinator and s.coordinator.slot == 1)
        if victim == 0:
            await steps_on(gang, survivors)
        assert await list_sizes(gang) == [3]
        for store in stores:
            store.full = False
        await gang.start(0, 1)
        await gang.until(lambda s: s.running and len(s.members) == 3)
        claims = (await gang.run_log()).claims
        assert [c.epoch for c in claims][:2] == [1, 2]
        assert [m.slot for m in claims[1].members] == survivors
        await stop(gang)


async def test_members_go_on_if_the_store_stops_answering_while_newcomers_take_the_state(
    tmp_path: Path, stores: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold at a boundary at that moment. The newcomer joins once the store is back."""
    monkeypatch.setattr(fence, "FENCE_SECONDS", 60.0)  # else it might notice before they hold
    wait_taken, outages = join._wait_taken, list[int]()

    async def lose_the_store(*given: Any) -> Any:
        taken = await wait_taken(*given)
        if not outages:
            outages.append(len(taken))
            for store in stores:
                store.away = True
        return taken

    monkeypatch.setattr(join, "_wait_taken", lose_the_store)
    async with Gang(tmp_path, 3, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        os.kill(gang.worker(2), signal.SIGKILL)
        await gang.until(lambda s: bool(outages))
        await steps_on(gang, [0, 1], 10)
        assert outages == [1]
        assert await list_sizes(gang) == [3, 2]
        for store in stores:
            store.away = False
        await gang.until(lambda s: s.running and len(s.members) == 3)
        assert (await list_sizes(gang))[:3] == [3, 2, 2]
        await stop(gang)


async def test_a_store_that_takes_no_writes_costs_a_join_and_no_steps(
    tmp_path: Path, stores: list[Log]
) -> None:
    async with Gang(tmp_path, 2, in_place=1, hang_seconds=60.0) as gang:
        await gang.until(lambda s: s.step >= 5)
        for store in stores:
            store.denied = True
        gang.want(want_workers=3, max_workers=3)
        await gang.start(2, 0)
        await gang.until(lambda s: "newcomers_wait" in gang.shown(), 60.0)
        await steps_on(gang, [0, 1], 10)
        os.kill(gang.worker(1), signal.SIGKILL)
        await steps_on(gang, [0], 10)
        for store in stores:
            store.denied = False
        await gang.until(lambda s: s.running and len(s.members) == 3, 60.0)
        assert (await list_sizes(gang))[:3] == [2, 2, 1]
        await stop(gang)
