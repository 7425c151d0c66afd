"""All pods get SIGTERM, and the store is too slow for it. Nothing is lost that some memory or disk holds."""

import asyncio
import time
from pathlib import Path

import pytest

from agent import gang as gangs
from agent.gang import Gang, assert_exact
from everstep_agent.agent import Agent
from everstep_agent.storage.errors import Unreachable
from everstep_agent.storage.retrying import Retrying
from everstep_contract import report
from runtime import a_paced_script

NOTICE = 10.0
GRACE = 9.0
"""The part of the notice that the operator passes on to the agents."""
STEPS = 200
LONG = pytest.mark.long


class SlowStore:
    """The upload of a chunk takes far longer than the notice, until the test sets `over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over, put = False, Retrying.put

        async def wait(store: Retrying, key: str, body: bytes) -> None:
            if key.startswith("chunks/") and not self.over:
                await asyncio.sleep(60)
                raise Unreachable(f"{key}: no answer")
            await put(store, key, body)

        monkeypatch.setattr(Retrying, "put", wait)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    monkeypatch.setattr(gangs, "STUB", a_paced_script.__file__)
    return SlowStore(monkeypatch)


class OnNodes(Gang):
    """Each pod uses its node's disk. A slot's next attempt runs on the other slot's node."""

    async def start(self, slot: int, attempt: int, **changes: object) -> Agent:
        disk = self.tmp / f"node-{(slot + attempt) % 2}"
        return await super().start(slot, attempt, disk_tier=str(disk), **changes)


def paced(gang: Gang) -> Gang:
    gang.stub["PACED_STEPS"] = str(STEPS)
    return gang


async def leave(gang: Gang, apart: float) -> int:
    """Send SIGTERM to both pods; return the furthest step that any worker has applied."""
    await gang.until(lambda s: s.step >= 5)
    for slot in (0, 1):
        gang.agents[slot].leave()
        await asyncio.sleep(apart)
    began = time.monotonic()
    ends = await gang.reports()
    assert time.monotonic() - began < NOTICE
    assert {r.cause for r in ends.values()} == {report.Cause.LEFT}
    books = (a.pod.book.upto(10**9) for a in gang.agents.values())
    reached = max(entry.step for book in books for entry in book)
    assert any(f"step {reached} is in this pod's memory" in r.message for r in ends.values())
    return reached


async def come_back(gang: Gang, attempt: int) -> None:
    for slot in (0, 1):
        await gang.kill(slot, say=False)
        await gang.start(slot, attempt)
    await gang.until(lambda s: s.epoch and s.epoch > 1 and s.running)


async def goes_on_from(gang: Gang, reached: int) -> None:
    run_log = await gang.run_log()
    assert run_log.claims[-1].chain[-1].last_step == reached
    await gang.reports()
    await assert_exact(gang, STEPS)


@pytest.mark.parametrize(
    ("in_place", "apart"),
    [
        (1, 1.5),
        pytest.param(1, 0.0, marks=LONG),
        pytest.param(0, 0.0, marks=LONG),
        pytest.param(0, 1.5, marks=LONG),
    ],
)
async def test_pods_that_come_back_with_their_memory_go_on_from_the_step_of_the_signal(
    tmp_path: Path, store: SlowStore, in_place: int, apart: float
) -> None:
    async with paced(Gang(tmp_path, 2, grace_seconds=GRACE, in_place=in_place)) as gang:
        reached = await leave(gang, apart)
        store.over = True
        await come_back(gang, 0)
        await goes_on_from(gang, reached)


@LONG
async def test_new_pods_on_the_same_nodes_go_on_from_what_lies_on_their_disks(
    tmp_path: Path, store: SlowStore
) -> None:
    """The disks hold an older save, and the next copy is due in ten minutes."""
    gang = paced(
        OnNodes(
            tmp_path,
            2,
            grace_seconds=GRACE,
            in_place=1,
            save_every_steps=3,
            peer_bandwidth=0,
            disk_seconds=600.0,
        )
    )
    async with gang:
        reached = await leave(gang, 0.0)
        store.over = True
        await come_back(gang, 1)
        await goes_on_from(gang, reached)


@LONG
async def test_without_memory_and_disks_the_run_goes_back_to_its_newest_commit(
    tmp_path: Path, store: SlowStore
) -> None:
    store.over = True
    async with paced(Gang(tmp_path, 2, grace_seconds=GRACE, save_every_steps=4)) as gang:
        await gang.until(lambda s: s.committed)
        store.over = False
        reached = await leave(gang, 0.0)
        committed = (await gang.run_log()).commits[-1].step
        assert committed < reached
        store.over = True
        await come_back(gang, 1)
        await goes_on_from(gang, committed)
