"""While checkpoints cannot be committed, newer saves wait in memory instead of filling the store with chunks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_run import stage
from agent.gang import Gang, assert_exact
from agent.given import an_epoch
from agent.test_dropped_uploads import GatedStore, an_upload_queue
from agent.test_pending_saves import part, saves
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator.saves import BACKLOG, Saves, Trouble
from everstep_agent.coordinator.spent_time import SpentTime
from everstep_agent.pod.save_queue import Listener
from everstep_agent.storage.errors import Unreachable
from everstep_agent.storage.retrying import Retrying
from everstep_contract import levels

__all__ = ["saves"]  # a fixture
TROUBLE = Trouble(level=levels.StorageError(kind="Denied", message=""), transient=False, since=0.0)


def test_pods_hold_newer_saves_while_several_complete_ones_cannot_be_committed(
    saves: Saves,
) -> None:
    epoch = an_epoch()
    steps = [5 * n for n in range(1, BACKLOG + 1)]
    for step in steps:
        for rank in range(epoch.world):
            saves.add(part(step, rank=rank))
    saves.add(part(steps[-1] + 5))
    assert saves.find_backlog(epoch) == 0, "no commit has failed"
    saves.trouble = TROUBLE
    assert saves.find_backlog(epoch) == steps[-1]
    saves.drop_older(1, steps[0])
    assert saves.find_backlog(epoch) == 0


@pytest.mark.parametrize(("epoch", "over"), [(1, False), (2, True)], ids=["waits", "dropped"])
async def test_the_trouble_with_a_commit_is_over_once_its_save_is_dropped(
    saves: Saves, epoch: int, over: bool
) -> None:
    """Else status would show it until the next commit, and nobody would look for a rank that does not start."""
    saves.add(part(5))
    saves.trouble = TROUBLE
    saves.drop_older(epoch, 0)
    saves.pump(an_epoch(number=epoch), {}, SpentTime())
    assert (saves.trouble is None) == over
    await saves.close()


async def test_what_the_job_waits_for_is_uploaded_all_the_same(tmp_path: Path) -> None:
    store, parts, heard = GatedStore(), list[Part](), asyncio.Event()
    store.gate.set()

    def on_part(part: Part) -> None:
        parts.append(part)
        heard.set()

    listener = Listener(on_part=on_part, on_failed=lambda staged, rank: None, on_held=heard.set)
    uploads = an_upload_queue(store, tmp_path, listener)

    async def add(step: int, *, whole: bool) -> None:
        heard.clear()
        staged = stage(tmp_path, epoch=1, step=step, rank=1, world=2)
        uploads.add(replace(staged, whole=whole), 1)
        await asyncio.wait_for(heard.wait(), 30)

    try:
        uploads.hold_after(4)
        await add(6, whole=False)
        assert uploads.busy, "it is here and will be uploaded"
        heard.clear()
        await add(7, whole=True)
        async with asyncio.timeout(30):
            while not parts:
                heard.clear()
                await heard.wait()
        assert [p.step for p in parts] == [7]
        heard.clear()
        uploads.hold_after(0)
        await asyncio.wait_for(heard.wait(), 30)
        assert [p.step for p in parts] == [7, 6]
    finally:
        await uploads.close()


async def test_a_store_that_refuses_manifests_does_not_fill_with_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing, sent, create, put = True, set[int](), Retrying.create, Retrying.put

    async def refuse(store: Retrying, key: str, body: bytes) -> None:
        if refusing and key.startswith("manifests/"):
            raise Unreachable(f"{key}: no answer")
        await create(store, key, body)

    async def note(store: Retrying, key: str, body: bytes) -> None:
        if key.startswith("chunks/"):
            sent.add(int(key.split("/")[2]))
        await put(store, key, body)

    monkeypatch.setattr(Retrying, "create", refuse)
    monkeypatch.setattr(Retrying, "put", note)
    gang = Gang(tmp_path, 2, save_every_steps=2, peer_bandwidth=0)
    gang.stub |= {"STUB_UNTIL": "24", "STUB_STEP_MS": "50"}
    async with gang:
        await gang.until(lambda s: bool(s.staged and s.staged.step >= 20))
        assert len(sent) <= BACKLOG + 2, sent
        refusing = False
        await gang.reports()
        await assert_exact(gang, 24)
