"""A save that was staged but not uploaded when everything was killed is committed or dropped by the log's rules."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from agent.given import a_claim, a_report
from everstep_agent.checkpoint.unsent import NAME
from everstep_agent.coordinator.unfinished import decide_unfinished
from everstep_agent.peers.agent_report import UnsentSave
from everstep_agent.storage.errors import Unreachable
from everstep_agent.storage.retrying import Retrying
from everstep_contract.log import MemberId
from everstep_contract.units import ONE_RANK, Mesh

# --- which save is finished -----------------------------------------------------------------------

MEMBERS = tuple(
    MemberId(slot=slot, attempt=0, incarnation=1, rank=rank, life=1)
    for slot in (0, 1)
    for rank in (0, 1)
)


def decide(
    *saves: tuple[int, int, int], committed: int = 10, whole: bool = False, mesh: Mesh = ONE_RANK
) -> int | None:
    """The step to finish, if two pods of two ranks report these saves: (epoch, step, rank)."""
    told = [UnsentSave(epoch=e, step=s, rank=r, whole=whole) for e, s, r in saves]
    reports = [a_report(0, unsent=tuple(told[::2])), a_report(1, unsent=tuple(told[1::2]))]
    found = decide_unfinished(a_claim(3, members=MEMBERS), committed, reports, mesh)
    assert found is None or (found[0].number, found[0].world) == (3, 4)
    return found[1] if found else None


def test_a_save_of_which_every_part_is_there_is_finished() -> None:
    assert decide(*((3, 12, rank) for rank in range(4))) == 12


def test_a_save_of_which_a_part_is_missing_is_not() -> None:
    assert decide((3, 12, 0), (3, 12, 1), (3, 12, 3)) is None
    assert decide() is None


def test_the_newest_complete_one_counts() -> None:
    both = [(3, step, rank) for step in (12, 15) for rank in range(4)]
    assert decide(*both) == 15
    assert decide(*both[:-1]) == 12


def test_one_rank_with_the_whole_state_is_enough() -> None:
    assert decide((3, 12, 2), whole=True) == 12


def test_one_unit_with_the_whole_state_is_enough() -> None:
    units = {"whole": True, "mesh": Mesh(shard=2)}
    assert decide((3, 12, 2), (3, 12, 3), **units) == 12  # type: ignore[arg-type]
    assert decide((3, 12, 1), (3, 12, 2), **units) is None  # type: ignore[arg-type]
    assert decide((3, 12, 2), (3, 13, 3), **units) is None  # type: ignore[arg-type]


def test_what_is_committed_already_is_not_finished_again() -> None:
    assert decide(*((3, 10, rank) for rank in range(4))) is None


def test_a_save_of_another_epochs_chain_is_not_finished() -> None:
    """Epoch 2 was cut off when epoch 3 was claimed; epoch 4 was never claimed."""
    for epoch in (2, 4):
        assert decide(*((epoch, 12, rank) for rank in range(4))) is None


# --- a whole job ----------------------------------------------------------------------------------


class Outage:
    """The store refuses the chunks of `step` and later steps until the test sets `over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.over, put = False, Retrying.put

        async def refuse(store: Retrying, key: str, body: bytes) -> None:
            if not self.over and key.startswith("chunks/") and int(key.split("/")[2]) >= step:
                raise Unreachable(f"{key}: no answer")
            await put(store, key, body)

        monkeypatch.setattr(Retrying, "put", refuse)


def a_gang(tmp_path: Path) -> Gang:
    gang = Gang(tmp_path, 2, save_every_steps=6, peer_bandwidth=0)
    gang.stub |= {"STUB_UNTIL": "24", "STUB_STEP_MS": "100"}
    return gang


def list_unsent(gang: Gang, slot: int) -> list[Path]:
    return list((gang.tmp / f"m-{gang.uid}-{slot}-0/staging").glob(f"*{NAME}"))


async def kill_once_staged(gang: Gang, between: Callable[[], None] = lambda: None) -> None:
    """Kill all processes once step 12 is staged and 6 committed, and start them again."""
    await gang.until(lambda s: s.committed and s.committed.step == 6)
    await gang.until(lambda s: s.staged and s.staged.step == 12)
    await gang.until(
        lambda s: all(any("-12-" in p.name for p in list_unsent(gang, n)) for n in (0, 1))
    )
    await asyncio.gather(*(gang.kill(slot, say=False) for slot in (0, 1)))
    between()
    for slot in (0, 1):
        await gang.start(slot, 0)


async def test_a_save_that_all_had_staged_is_committed_by_those_that_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, 12)
    async with a_gang(tmp_path) as gang:
        await kill_once_staged(gang, lambda: setattr(outage, "over", True))
        await gang.until(lambda s: s.epoch == 2 and s.running)
        run_log = await gang.run_log()
        assert [(c.epoch, c.step) for c in run_log.commits][:2] == [(1, 6), (1, 12)]
        assert run_log.commits[1].token == run_log.claims[0].token
        assert [(link.epoch, link.last_step) for link in run_log.claims[1].chain] == [(1, 12)]
        assert all(set(a.pod.restored_from) <= {"memory", "peer"} for a in gang.agents.values())
        await gang.reports()
        await assert_exact(gang, 24)


async def test_a_save_whose_other_part_is_lost_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, 12)

    def lose_memory() -> None:
        outage.over = True
        shutil.rmtree(tmp_path / "m-uid-1-1-0/staging")

    async with a_gang(tmp_path) as gang:
        await kill_once_staged(gang, lose_memory)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        run_log = await gang.run_log()
        assert [(link.epoch, link.last_step) for link in run_log.claims[1].chain] == [(1, 6)]
        assert not any("-12-" in path.name for path in list_unsent(gang, 0))
        await gang.reports()
        await assert_exact(gang, 24)


async def test_a_torn_staged_file_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, 12)

    def tear() -> None:
        outage.over = True
        (note,) = (p for p in list_unsent(gang, 1) if "-12-" in p.name)
        note.with_name(note.name.removesuffix(NAME)).write_bytes(b"\1" * 16)

    async with a_gang(tmp_path) as gang:
        await kill_once_staged(gang, tear)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert "is not what was staged" in gang.shown()
        run_log = await gang.run_log()
        assert [(link.epoch, link.last_step) for link in run_log.claims[1].chain] == [(1, 6)]
        await gang.reports()
        await assert_exact(gang, 24)
