"""Units, with real agents and stub workers: the whole units continue in place, and the lost one comes back whole."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.gang import Gang, assert_exact
from everstep_contract import levels
from everstep_contract.units import ONE_RANK, Mesh

SCRIPT = str(Path(__file__).with_name("stub_in_place.py"))
MICRO_BATCHES = 7


def units(tmp_path: Path, pods: int, mesh: Mesh, **settings: object) -> Gang:
    gang = Gang(tmp_path, pods, mesh=mesh, in_place=1, **settings)
    (tmp_path / "orders").mkdir()
    gang.script = SCRIPT
    gang.stub |= {
        "STUB_IN_PLACE": "1",
        "STUB_UNTIL": "100000",
        "STUB_ORDERS": str(tmp_path / "orders"),
        "STUB_UNIT_LOST": str(tmp_path / "lost"),
    }
    gang.want(min_workers=pods // 2)
    return gang


def write(file: Path, text: str) -> None:
    file.write_text(text)


def pids(gang: Gang) -> set[int]:
    current = (w for a in gang.agents.values() for w in a.pod.workers.current.values())
    return {w.pid for w in current if w.alive}


async def regrown(gang: Gang) -> levels.Seen:
    whole = sum(agent.pod.workers.count for agent in gang.agents.values())
    seen = await gang.until(
        lambda s: s.incidents and not s.incidents[-1].open and s.running and len(s.members) < whole
    )
    small = seen.epoch
    return await gang.until(lambda s: s.running and s.epoch > small and len(s.members) == whole)


async def stop(gang: Gang) -> int:
    later = gang.seen.step + 5
    await gang.until(lambda s: s.step >= later)
    stopped = await gang.suspend()
    assert all(i.steps_lost == 0 for i in gang.seen.incidents)
    await assert_exact(gang, stopped)
    return stopped


class Computed(NamedTuple):
    """What one rank computed for a step that it completed."""

    pid: int
    epoch: int
    unit: int
    index: int
    order: tuple[int | None, ...]


def check_orders(folder: Path, steps: int, losses: int) -> None:
    """Assert that ranks run in lockstep and no step has a micro-batch twice. A step may lack micro-batches only if a
    rank that had computed them died.
    """
    by_step = read_orders(folder)
    last = {c.pid: step for step in sorted(by_step) for c in by_step[step]}
    incomplete = 0
    for step in range(1, steps + 1):
        told = f"step {step}: {by_step[step]}"
        newest = max(c.epoch for c in by_step[step])
        current = [c for c in by_step[step] if c.epoch == newest]
        lost = [c for c in by_step[step] if c.epoch < newest]
        assert all(last[c.pid] == step for c in lost), f"completed twice by one process: {told}"
        shares = {c.index: c.order for c in current}
        assert all(shares[c.index] == c.order for c in current), told
        counts = {(c.unit, len(c.order)) for c in current}
        assert len(counts) == len({unit for unit, _ in counts}), told
        done = Counter(i for order in shares.values() for i in order if i is not None)
        assert all(n == 1 for n in done.values()), told
        incomplete += len(done) < MICRO_BATCHES
    assert incomplete <= losses


def read_orders(folder: Path) -> dict[int, list[Computed]]:
    """Read the orders by step. If a unit is lost after it alone has completed a step, the others complete that step in
    the next epoch.
    """
    by_step: dict[int, list[Computed]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            step, epoch, unit, index, order = json.loads(line)
            computed = Computed(int(file.name), epoch, unit, index, tuple(order))
            by_step.setdefault(step, []).append(computed)
    return by_step


@pytest.mark.parametrize(
    ("pods", "workers", "mesh"),
    [(4, 1, Mesh(shard=2)), (2, 2, Mesh(tensor=2))],
    ids=["shard, pods of one", "tensor, pods of two"],
)
async def test_the_whole_unit_goes_on_and_the_lost_one_comes_back(
    tmp_path: Path, pods: int, workers: int, mesh: Mesh
) -> None:
    async with units(tmp_path, pods, mesh, workers=workers) as gang:
        await gang.until(lambda s: s.step >= 5)
        before = pids(gang)
        stays = {gang.worker(pods - 1, local) for local in range(workers)}
        os.kill(gang.worker(0), signal.SIGKILL)
        seen = await regrown(gang)
        (incident,) = seen.incidents
        assert (incident.cause, incident.rank, incident.rung) == ("WorkerDied", 0, "regroup")
        assert "event=unit_ends" in gang.shown()
        assert pids(gang) & before >= stays, "a process of the whole unit has ended"
        assert len(pids(gang) & before) == mesh.unit
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims] == [4, 2, 4]
        check_orders(tmp_path / "orders", await stop(gang), 1)


async def test_half_of_the_ranks_hold_until_the_silent_pod_is_known_to_be_lost(
    tmp_path: Path,
) -> None:
    """The coordinator's pod falls silent: two of four ranks, without the lowest slot, are no majority."""
    async with units(tmp_path, 2, ONE_RANK, workers=2) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        silent = gang.seen.coordinator.slot
        assert silent == 0, "the lowest slot decides for one half"
        successor = gang.agents[1]._state

        def has_asked_in_vain(_: levels.Seen) -> bool:
            held = successor.coordinator
            return held is not None and bool(held.term.silence.unanswered)

        await gang.kill(silent, say=False)
        await gang.until(has_asked_in_vain)
        assert not gang.seen.running
        gang.want(dead=(levels.DeadAgent(slot=silent, attempt=0, incarnation=1),))
        seen = await gang.until(lambda s: s.running and all(not i.open for i in s.incidents))
        assert [i.rung for i in seen.incidents] == ["regroup"]
        check_orders(tmp_path / "orders", await stop(gang), 2)


async def test_a_unit_without_a_death_is_ended_by_the_word_of_its_rank(tmp_path: Path) -> None:
    async with units(tmp_path, 4, Mesh(shard=2)) as gang:
        await gang.until(lambda s: s.step >= 5)
        write(tmp_path / "part", str(gang.worker(2)))
        os.rename(tmp_path / "part", tmp_path / "lost")
        seen = await regrown(gang)
        assert [i.rung for i in seen.incidents] == ["regroup"]
        assert "rank=2,3" in gang.shown()
        check_orders(tmp_path / "orders", await stop(gang), 1)


async def test_a_spare_takes_the_place_of_a_lost_pod_in_its_unit(tmp_path: Path) -> None:
    async with units(tmp_path, 4, Mesh(shard=2)) as gang:
        await gang.until(lambda s: s.step >= 5)
        await gang.start(4, 0)
        await gang.kill(1)
        gang.want(gone=(levels.SlotAttempt(slot=1, attempt=0),))
        seen = await gang.until(lambda s: s.running and {m.slot for m in s.members} == {0, 2, 3, 4})
        ranks = {m.slot: m.rank for m in seen.members}
        assert ranks == {0: 0, 4: 1, 2: 2, 3: 3}, "the spare joins the unit of slot 1"
        check_orders(tmp_path / "orders", await stop(gang), 1)


async def test_who_leaves_takes_its_unit_along_and_the_rest_of_it_joins_again(
    tmp_path: Path,
) -> None:
    async with units(tmp_path, 4, Mesh(shard=2)) as gang:
        await gang.until(lambda s: s.step >= 5)
        stays = {gang.worker(0), gang.worker(1)}
        gang.want(leave=(3,), incident="inc-1")
        await gang.until(lambda s: s.running and {m.slot for m in s.members} == {0, 1})
        assert pids(gang) >= stays
        await gang.until(lambda s: [x.slot for x in s.left] == [3])
        await gang.start(4, 0)
        seen = await gang.until(lambda s: s.running and len(s.members) == 4)
        assert [(m.slot, m.rank) for m in seen.members] == [(0, 0), (1, 1), (2, 2), (4, 3)]
        assert pids(gang) >= stays
        check_orders(tmp_path / "orders", await stop(gang), 1)
