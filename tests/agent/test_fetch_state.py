"""What a pod does when it cannot load a checkpoint into its memory: it waits, reports why, and does
not fall back to an older checkpoint.
"""

import asyncio
from pathlib import Path

import pytest

from agent.a_run import ARun
from everstep_agent.pod import fetch_state
from everstep_agent.storage import open_store
from everstep_contract import levels


async def test_where_there_is_no_room_for_a_checkpoint_it_is_said_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_state, "RETRY_SECONDS", 0.02)
    store = open_store("memory://", "", {})
    run = ARun(store, tmp_path / "staged")
    await run.claim(1)
    newest = await run.save(2)
    folder = tmp_path / "restore"
    folder.write_bytes(b"")  # a file in the folder's place: nothing can be written in it
    said: list[levels.StorageError | None] = []
    told = asyncio.Event()

    def on_wait(error: levels.StorageError | None) -> None:
        said.append(error)
        told.set()

    fetching = asyncio.create_task(fetch_state.fetch(store, newest, folder, on_wait))
    await asyncio.wait_for(told.wait(), 30)
    folder.unlink()
    fetched = await asyncio.wait_for(fetching, 30)
    assert fetched is not None
    assert fetched.commit == newest
    assert said[0] is not None
    assert said[0].kind == "NoRoom"
    assert "checkpoint of step 2" in said[0].message
    assert "stagingMemory" in said[0].message
    assert said[-1] is None
