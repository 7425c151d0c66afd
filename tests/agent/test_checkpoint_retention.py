import contextlib
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.a_run import ARun, claim, commit, read_alone, upload
from agent.restored import restore_newest
from agent.unreliable import UnreliableStore
from everstep_agent.checkpoint.chunk_upload import chunk_key
from everstep_agent.checkpoint.retention import UNDELETED, Retention
from everstep_agent.checkpoint.retention_rules import build_retire, choose_retired, step_of
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Denied, Unreachable, Unsupported
from everstep_agent.storage.probe import probe
from everstep_agent.tools.verify import verify_run
from everstep_contract.log import Retire


def saves(*steps: int) -> list:
    return [claim(1), *(commit(1, s) for s in steps)]


def chosen(entries: list, good: list[int], keep: int) -> list[int]:
    keys = {commit(1, s).manifest for s in good}
    return [c.step for c in choose_retired(LogIndex(entries), keys, keep)]


def test_the_newest_good_ones_stay() -> None:
    assert chosen(saves(1, 2, 3, 4, 5), [1, 2, 3, 4, 5], 2) == [1, 2, 3]


def test_what_was_not_read_back_neither_counts_nor_goes_if_it_is_newer() -> None:
    assert chosen(saves(1, 2, 3, 4, 5), [1, 2], 2) == []
    assert chosen(saves(1, 2, 3, 4, 5), [2, 3], 1) == [1, 2]


def test_nothing_goes_while_too_few_are_good() -> None:
    assert chosen(saves(1, 2, 3), [3], 2) == []


def test_what_was_retired_is_not_retired_again() -> None:
    retire = Retire(epoch=1, token="t", manifests=(commit(1, 1).manifest,))
    assert chosen([*saves(1, 2, 3), retire], [2, 3], 1) == [2]


def test_older_commits_off_the_lineage_go_too() -> None:
    second = claim(2, resume=commit(1, 1), before=[claim(1)])
    entries = [*saves(1, 5), second, commit(2, 3)]
    assert [c.step for c in choose_retired(LogIndex(entries), {commit(2, 3).manifest}, 1)] == [1, 5]


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        choose_retired(LogIndex(saves(1)), [], 0)


@given(st.integers(1, 12), st.sets(st.integers(1, 12)), st.integers(1, 5))
def test_the_newest_good_one_and_all_that_is_newer_always_stay(
    count: int, good: set[int], keep: int
) -> None:
    entries = saves(*range(1, count + 1))
    gone = chosen(entries, sorted(good), keep)
    newest = max((g for g in good if g <= count), default=None)
    assert not gone or (newest is not None and max(gone) < newest)


def test_a_chunk_that_a_kept_manifest_names_stays() -> None:
    entry = build_retire("t", 1, [(commit(1, 1), {"a", "b"}), (commit(1, 2), ())], {"b"})
    assert entry.chunks == ("a",)
    assert len(entry.manifests) == 2


# --- with a store


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


async def a_run(store: ObjectStore, folder: Path, *steps: int) -> ARun:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    for before, step in zip((0, *steps), steps, strict=False):
        await run.save(step, since=before)
    return run


async def test_old_checkpoints_go_and_the_run_can_still_be_proved(
    store: ObjectStore, tmp_path: Path
) -> None:
    run = await a_run(store, tmp_path, 2, 4, 6, 8)
    retention = Retention(store, run.log, keep=2)
    for one in run.log.commits:
        assert await retention.check(one, read_alone(run.store)) == ""
    assert run.claimed
    entry = await retention.retire(run.claimed.token)
    assert entry is not None
    assert run.log.entries[-1] == entry
    keys = await store.list()
    assert not set(keys) & {*entry.manifests, *entry.chunks}
    assert len([k for k in keys if k.startswith("manifests/")]) == 2
    assert retention.newest_good == run.log.commits[-1]
    verified = await verify_run(store)
    assert (verified.problems, verified.steps, verified.commits) == ((), 8, 2)
    restored = await restore_newest(store, run.log, tmp_path / "memory")
    assert restored.fetched is not None


async def test_a_checkpoint_that_reads_back_wrong_is_not_good_and_says_why(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2, 4)
    newest = run.log.commits[-1]
    bad_day.corrupt = {k for k in await bad_day.list("chunks") if "0000000004" in k}
    retention = Retention(bad_day, run.log, keep=1)
    assert "is corrupt" in await retention.check(newest, read_alone(run.store))
    assert retention.newest_good is None
    assert list(retention.broken) == [newest.manifest]
    assert await retention.retire("token001-rest") is None


async def test_a_chunk_that_was_read_back_is_not_read_again(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2, 4)
    retention = Retention(bad_day, run.log, keep=1)
    await retention.check(run.log.commits[0], read_alone(run.store))
    bad_day.calls.clear()
    await retention.check(run.log.commits[1], read_alone(run.store))
    read = [key for _, key in bad_day.calls]
    assert len(read) == len(set(read))
    assert not [k for k in read if k.startswith("chunks/") and "0000000002" in k]


async def test_who_no_longer_holds_the_newest_claim_retires_nothing(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2, 4)
    retention = Retention(bad_day, run.log, keep=1)
    for one in run.log.commits:
        await retention.check(one, read_alone(run.store))
    await run.claim(2, resume=run.log.commits[-1])
    before = await bad_day.list()
    assert await retention.retire("token001-rest") is None
    assert await bad_day.list() == before


async def test_deletions_left_half_done_are_finished_by_the_next_coordinator(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2, 4)
    retention = Retention(bad_day, run.log, keep=1)
    for one in run.log.commits:
        await retention.check(one, read_alone(run.store))
    first = run.log.commits[0].manifest
    body = await bad_day.get(first)
    entry = await retention.retire("token001-rest")
    assert entry is not None
    await bad_day.put(first, body)
    after = Retention(bad_day, run.log, keep=1)
    assert await after.retire("token001-rest") is None
    assert first not in await bad_day.list()


class UndeletableStore(UnreliableStore):
    """Deletes nothing while `stuck`, and never what is `held`."""

    stuck = False
    held: Collection[str] = ()

    async def delete(self, key: str) -> None:
        self._reach("delete", key)
        if self.stuck:
            raise Unreachable(f"{key}: the store does not answer")
        if key in self.held:
            raise Denied(f"{key}: the object is under a legal hold")
        await super().delete(key)


async def test_an_object_that_must_not_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    """Neither of its own entry, nor of the entries of the next coordinator."""
    store = UndeletableStore(open_store("memory://", "", {}))
    run = await a_run(store, tmp_path, 2, 4)
    store.held = {run.log.commits[0].manifest}
    assert run.claimed
    for first in (6, 10):
        retention = Retention(store, run.log, keep=1)
        for step in (first, first + 2):
            await run.save(step, since=step - 2)
            assert await retention.check(run.log.commits[-1], read_alone(store)) == ""
            with pytest.raises(Denied, match="legal hold"):
                await retention.retire(run.claimed.token)
    assert [commit.step for commit in run.log.index.standing] == [12]
    listed = [*await store.list("manifests"), *await store.list("chunks")]
    assert [key for key in listed if run.log.index.is_retired(key)] == list(store.held)


class UnlistedStore(UnreliableStore):
    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        raise Unsupported(f"cannot list {prefix}: this store does not offer it")


async def test_a_store_that_cannot_list_its_keys_keeps_no_old_checkpoints(tmp_path: Path) -> None:
    store = UnlistedStore(open_store("memory://", "", {}))
    run = await a_run(store, tmp_path, 2, 4)
    assert run.claimed
    retention = Retention(store, run.log, keep=1)
    assert await retention.check(run.log.commits[-1], read_alone(store)) == ""
    with pytest.raises(Unsupported):
        await retention.retire(run.claimed.token)
    assert [commit.step for commit in run.log.index.standing] == [4]
    assert [key for key in await store.inner.list() if run.log.index.is_retired(key)] == []


async def test_if_nothing_may_be_deleted_not_each_object_is_tried(tmp_path: Path) -> None:
    store = UndeletableStore(open_store("memory://", "", {}))
    await a_run(store, tmp_path, 2)
    store.held = keys = [f"chunks/token001/0000000002/{n:064x}" for n in range(1000)]
    for key in keys:
        await store.put(key, b"x")
    log = RunLog(store)
    await log.refresh()
    await log.append(Retire(epoch=1, token="token001-rest", chunks=tuple(keys)))
    store.calls.clear()
    with pytest.raises(Denied):
        await Retention(store, log, keep=1).retire("token001-rest")
    assert len([verb for verb, _ in store.calls if verb == "delete"]) < 100


async def test_deletions_that_failed_are_made_up_for_with_the_next_ones(tmp_path: Path) -> None:
    """A retired object is in no later entry, so it would stay for ever."""
    store = UndeletableStore(open_store("memory://", "", {}))
    run = await a_run(store, tmp_path, 2, 4)
    assert run.claimed
    retention = Retention(store, run.log, keep=1)
    for step in (6, 8, 10, 12, 14):
        store.stuck = step == 6
        await run.save(step, since=step - 2)
        assert await retention.check(run.log.commits[-1], read_alone(store)) == ""
        with pytest.raises(Unreachable) if store.stuck else contextlib.nullcontext():
            await retention.retire(run.claimed.token)
    listed = [*await store.list("manifests"), *await store.list("chunks")]
    assert [key for key in listed if run.log.index.is_retired(key)] == []


async def test_what_could_not_be_deleted_for_long_is_deleted_by_a_later_coordinator(
    tmp_path: Path,
) -> None:
    """A coordinator remembers only some of the entries, and its successor only the newest."""
    store = UndeletableStore(open_store("memory://", "", {}))
    run = await a_run(store, tmp_path, 2)
    assert run.claimed
    retention = Retention(store, run.log, keep=1)
    store.stuck = True
    for step in range(4, 4 + 2 * UNDELETED + 6, 2):
        await run.save(step, since=step - 2)
        assert await retention.check(run.log.commits[-1], read_alone(store)) == ""
        with pytest.raises(Unreachable):
            await retention.retire(run.claimed.token)
    store.stuck = False
    await Retention(store, run.log, keep=1).retire(run.claimed.token)
    listed = [*await store.list("manifests"), *await store.list("chunks")]
    assert [key for key in listed if run.log.index.is_retired(key)] == []
    assert (await verify_run(store)).problems == ()


async def test_what_a_dropped_save_left_behind_is_collected(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2)
    await upload(bad_day, tmp_path, token="token001-rest", epoch=1, step=3)
    await bad_day.put("manifests/00000001-0000000003-token001.json", b"never committed")
    await bad_day.put("notes/of-a-user-0000000003", b"not ours")
    before = set(await bad_day.list())
    assert await Retention(bad_day, run.log, keep=3).collect("token001-rest") is None
    await run.save(4, since=2)
    await upload(bad_day, tmp_path, token="token001-rest", epoch=1, step=5)
    entry = await Retention(bad_day, run.log, keep=3).collect("token001-rest")
    assert entry is not None
    gone = before - set(await bad_day.list())
    assert gone == {*entry.manifests, *entry.chunks}
    assert gone
    assert all("0000000003" in key for key in gone)
    assert "notes/of-a-user-0000000003" not in gone
    assert await Retention(bad_day, run.log, keep=3).collect("token001-rest") is None
    assert (await verify_run(bad_day)).problems == ()


async def test_what_a_killed_probe_left_behind_is_deleted_with_the_first_retirement(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_run(bad_day, tmp_path, 2)
    await bad_day.put("probe/0123456789abcdef", b"of a coordinator that was killed")
    # Of the run <this run>/probe/x in the same store.
    await bad_day.put("probe/x/log/0000000000.json", b"the log of another run")
    await Retention(bad_day, run.log, keep=3).retire("token001-rest")
    assert await bad_day.list("probe") == ["probe/x/log/0000000000.json"]


class TidiedMeanwhile(UnreliableStore):
    """Deletes each object before it is read, like a coordinator that tidies up under probe/."""

    async def get(self, key: str) -> bytes:
        await self.inner.delete(key)
        return await super().get(key)


async def test_a_probe_whose_object_was_tidied_away_refuses_no_store(
    bad_day: UnreliableStore,
) -> None:
    assert await probe(TidiedMeanwhile(bad_day)) == []


def test_keys_name_their_step() -> None:
    assert step_of(chunk_key("token001-rest", 12, "a" * 64)) == 12
    assert step_of("manifests/00000001-0000000034-token001-2.json") == 34
    assert step_of("chunks/token001/x/" + "a" * 64) is None
    assert step_of("log/000000000001.json") is None
