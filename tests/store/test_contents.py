"""A run's folder is validated, never trusted. Its objects may be foreign, damaged, hostile or
missing.
"""

import hashlib
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.a_run import ARun, claim, commit, content, read_alone
from agent.restored import Restored, restore_newest
from agent.unreliable import UnreliableStore
from everstep_agent.checkpoint import retention
from everstep_agent.runlog.run_log import LogDamaged, RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Denied
from everstep_agent.tools import verify
from everstep_contract import codec, log
from everstep_contract.log import Retire


class WithoutList(UnreliableStore):
    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        raise Denied(f"cannot list {prefix}")


@pytest.fixture
def memory() -> ObjectStore:
    return open_store("memory://", "", {})


async def three_saves(store: ObjectStore, folder: Path) -> ARun:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    for step in (2, 4, 6):
        await run.save(step, since=step - 2)
    return run


async def restored(run: ARun, folder: Path) -> Restored:
    return await restore_newest(run.store, run.log, folder / "memory")


# --- the log


@pytest.mark.parametrize("gone", [0, 1, 3])
async def test_a_log_with_a_hole_is_neither_continued_nor_believed(
    memory: ObjectStore, tmp_path: Path, gone: int
) -> None:
    run = await three_saves(memory, tmp_path)
    await run.claim(2, resume=run.log.commits[-1])
    await memory.delete(log.key(gone))
    reader = RunLog(memory)
    await reader.refresh()
    assert len(reader.entries) == gone
    with pytest.raises(LogDamaged, match=rf"{log.key(gone)} is gone, though place 4 stands"):
        await reader.check_whole()
    found = await verify.verify_run(memory)
    assert "is gone, though place 4 stands" in found.problems[0]


async def test_a_log_that_grows_while_it_is_checked_is_whole(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = await three_saves(memory, tmp_path)
    await run.log.check_whole()
    reader = RunLog(memory)
    await reader.check_whole()
    assert reader.entries == run.log.entries


async def test_without_the_right_to_list_the_log_is_taken_as_it_is_read(
    memory: ObjectStore,
) -> None:
    reader = RunLog(WithoutList(memory))
    await reader.append(claim(1))
    await reader.check_whole()


async def test_nothing_is_appended_in_a_bucket_that_was_emptied(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = await three_saves(memory, tmp_path)
    for key in await memory.list():
        await memory.delete(key)
    with pytest.raises(LogDamaged, match="is gone, though it was read before"):
        await run.log.append(commit(1, 8))
    with pytest.raises(LogDamaged, match=r"restore it, or start under another checkpoint\.run"):
        await run.log.check_kept()
    assert await memory.list() == []


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"\x80\x04K\x01.", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "kind None is none of claim, commit, retire, done"),
        (b'{"kind":"format-disk"}', "kind 'format-disk' is none of"),
        (b'{"kind":["claim"]}', "is none of"),
        (b'{"kind":"commit","epoch":"\xc2\xb2"}', "epoch: expected int"),
        (b'{"kind":"done","epoch":1,"token":"t"}', "step"),
    ],
)
async def test_a_foreign_object_in_the_place_of_an_entry_is_named(
    memory: ObjectStore, raw: bytes, said: str
) -> None:
    await memory.put(log.key(0), raw)
    with pytest.raises(LogDamaged) as caught:
        await RunLog(memory).refresh()
    assert said in str(caught.value)
    assert log.key(0) in str(caught.value)
    assert "start under another checkpoint.run" in str(caught.value)


async def test_a_retire_that_names_places_of_the_log_deletes_none(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = await three_saves(memory, tmp_path)
    hostile = Retire(
        epoch=1,
        token="token001-rest",
        manifests=(log.key(0), "../other/log/000000000000.json", "manifests/../log/1-2-3.json"),
        chunks=("chunks/../0000000001/" + "a" * 64, "probe/x"),
    )
    await run.log.append(hostile)
    before = await memory.list()
    await retention.Retention(memory, run.log, keep=1).retire("token001-rest")
    assert await memory.list() == before


# --- forged manifests, committed with a matching digest

Forge = Callable[[dict[str, Any]], None]


def forged(**changes: Any) -> Forge:
    return lambda document: document.update(changes)


def in_chunk(**changes: Any) -> Forge:
    return lambda document: document["chunks"][0].update(changes)


def in_piece(**changes: Any) -> Forge:
    return lambda document: document["tensors"][1]["pieces"][0].update(changes)


def overlapping(document: dict[str, Any]) -> None:
    first, second = document["tensors"][1]["pieces"]
    second["offsets"] = first["offsets"]


def deep(document: dict[str, Any]) -> None:
    tree: Any = None
    for _ in range(400):
        tree = {"a": [tree]}
    document["state"] = tree


def renamed(document: dict[str, Any]) -> None:
    """A chunk, and what refers to it, with a name that leads out of a folder."""
    text = codec.json.dumps(document["tensors"]).replace(document["chunks"][0]["digest"], OUTSIDE)
    document["tensors"] = codec.json.loads(text)
    document["chunks"][0]["digest"] = OUTSIDE


OUTSIDE = "../../../../etc/passwd"
FORGERIES = [
    (forged(version=2), "version 2; this reader knows 1"),
    (forged(features=["encrypted"]), "needs features that this reader lacks"),
    (forged(epoch=9), "is of epoch 9 step 6"),
    (forged(step=10**400), "is of epoch 1 step 1000"),
    (forged(step="²"), "step: expected int"),
    (deep, "nested deeper"),
    (in_chunk(key="../../../other/secret"), "has the key"),
    (in_chunk(key="log/000000000000.json"), "has the key"),
    (in_chunk(bytes=2**62), f"not {2**62}"),
    (in_chunk(digest="0" * 64), "outside its chunk"),
    (in_chunk(digest=OUTSIDE), "has the digest"),
    (renamed, "has the digest"),
    (in_piece(lengths=[2**62, 2**62]), "outside the shape"),
    (in_piece(at=2**62), "outside its chunk"),
    (overlapping, "two pieces hold (0, 0)"),
]


@pytest.mark.parametrize(("forge", "said"), FORGERIES)
async def test_a_hostile_manifest_is_passed_over_and_named(
    memory: ObjectStore, tmp_path: Path, forge: Forge, said: str
) -> None:
    run = await three_saves(memory, tmp_path)
    newest = run.log.commits[-1]
    document = codec.json.loads(await memory.get(newest.manifest))
    forge(document)
    raw = codec.json.dumps(document).encode()
    await replace_commit(run, hashlib.sha256(raw).hexdigest())
    await memory.put(newest.manifest, raw)
    found = await restored(run, tmp_path)
    assert found.fetched is not None
    assert found.fetched.commit.step == 4
    (skipped,) = found.skipped
    assert any(words in skipped.reason for words in said.split("|")), skipped.reason


async def replace_commit(run: ARun, digest: str, **changes: str) -> None:
    """Rewrite the newest commit with this digest."""
    newest = run.log.commits[-1]
    entry = {"kind": "commit", **codec.encode(newest), "digest": digest, **changes}
    await run.store.put(log.key(len(run.log.entries) - 1), codec.json.dumps(entry).encode())
    run.log = RunLog(run.store)
    await run.log.refresh()


@pytest.mark.parametrize(
    "key", ["../../other/manifest.json", "/etc/passwd", "manifests//x", "", "a\x00b"]
)
async def test_a_commit_that_names_a_place_outside_is_passed_over(
    memory: ObjectStore, tmp_path: Path, key: str
) -> None:
    run = await three_saves(memory, tmp_path)
    await replace_commit(run, "0" * 64, manifest=key)
    found = await restored(run, tmp_path)
    assert found.fetched is not None
    assert found.fetched.commit.step == 4
    assert "is not allowed" in found.skipped[0].reason


# --- chunks

Damage = Callable[[ObjectStore, list[str]], Awaitable[None]]


async def swap(store: ObjectStore, keys: list[str]) -> None:
    a, b = [await store.get(k) for k in keys[:2]]
    await store.put(keys[0], b)
    await store.put(keys[1], a)


async def plant_pickle(store: ObjectStore, keys: list[str]) -> None:
    await store.put(keys[0], pickle.dumps(Planted()))


async def expire(store: ObjectStore, keys: list[str]) -> None:
    """Delete a chunk, as a lifecycle rule on the bucket would."""
    await store.delete(keys[-1])


class Planted:
    hit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Planted, "hit", True))


@pytest.mark.parametrize("damage", [swap, plant_pickle, expire])
async def test_chunks_that_are_not_what_was_committed_send_the_run_one_checkpoint_back(
    memory: ObjectStore, tmp_path: Path, damage: Damage
) -> None:
    run = await three_saves(memory, tmp_path)
    keys = [k for k in await memory.list("chunks") if "/0000000006/" in k]
    await damage(memory, keys)
    found = await restored(run, tmp_path)
    if (
        found.skipped
    ):  # not if only the ledger's chunk was damaged, because then the state is intact
        assert any(k in found.skipped[0].reason for k in keys)
    assert found.fetched is not None
    assert found.fetched.commit.step == (4 if found.skipped else 6)
    piece = found.fetched.manifest.tensors[1].pieces[0]
    place = found.fetched.places[piece.chunk]
    stored = Path(place.path).read_bytes()[place.start :]  # noqa: ASYNC240
    assert stored[piece.at : piece.at + 4] == content(found.fetched.commit.step)[:4]
    assert not (await verify.verify_run(memory)).ok
    assert not Planted.hit


async def test_foreign_objects_beside_a_run_change_nothing(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = await three_saves(memory, tmp_path)
    for key in ("README.md", "checkpoint.pt", "log/notes.txt", "manifests/latest", "chunks/x"):
        await memory.put(key, pickle.dumps(Planted()))
    await run.log.check_whole()
    assert (await restored(run, tmp_path)).skipped == ()
    assert (await verify.verify_run(memory)).ok
    keeper = retention.Retention(memory, run.log, keep=1)
    assert await keeper.check(run.log.commits[-1], read_alone(memory)) == ""
    assert await keeper.retire("token001-rest") is not None
    assert {"README.md", "checkpoint.pt", "manifests/latest"} <= set(await memory.list())
    assert not Planted.hit
