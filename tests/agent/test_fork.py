from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.restored import restore_newest
from agent.retiring import RetiringStore
from agent.unreliable import NarrowStore, UnreliableStore
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.run_log import LogDamaged, RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import StoreError
from everstep_agent.tools import commands, fork, verify
from everstep_agent.tools.fetch import fetch_checkpoint
from everstep_contract import log


@pytest.fixture
def store() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


@pytest.fixture
def target() -> ObjectStore:
    return open_store("memory://", "", {})


async def a_run_of_two_epochs(store: UnreliableStore, folder: Path) -> None:
    """Make checkpoints of step 4 in epoch 1 and of step 9 in epoch 2."""
    run = ARun(store, folder)
    await run.claim(1)
    saved = await run.save(4)
    await run.claim(2, resume=saved, cause="WorkerDied")
    await run.save(9, since=4, world=1)


async def test_the_list_is_newest_first_and_says_why_the_epoch_began(
    store: UnreliableStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    catalog = await fork.list_checkpoints(store)
    assert [(c.step, c.epoch, c.cause) for c in catalog.checkpoints] == [
        (9, 2, "WorkerDied"),
        (4, 1, "Start"),
    ]
    assert "not finished, last written by default/job" in fork.build_table(catalog)


async def test_the_list_says_that_a_place_of_the_log_is_gone(
    store: UnreliableStore, tmp_path: Path
) -> None:
    """Else it would end there as if the run did."""
    await a_run_of_two_epochs(store, tmp_path)
    await store.delete(log.key(2))
    catalog = await fork.list_checkpoints(store)
    assert [c.step for c in catalog.checkpoints] == [4]
    last = fork.build_table(catalog).splitlines()[-1]
    assert last.startswith("PROBLEM ")
    assert "log/000000000002.json is gone" in last


async def test_a_run_whose_first_entry_was_deleted_is_not_said_to_be_none(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    """A lifecycle rule of the bucket deletes the oldest objects first."""
    await a_run_of_two_epochs(store, tmp_path)
    await store.delete(log.key(0))
    for read in (
        fork.list_checkpoints(store), fork.fork_run(store, target, 4), fetch_checkpoint(store, tmp_path),
    ):  # fmt: skip
        with pytest.raises(LogDamaged, match=r"log/000000000000.json is gone, though place 3"):
            await read


async def test_an_address_at_which_no_run_is_is_said_to_have_none(store: UnreliableStore) -> None:
    """It is often that of a store, without the run's name."""
    with pytest.raises(fork.CannotFork, match="there is no run; give the address STORE/NAME"):
        await fork.list_checkpoints(store)


async def test_a_fork_goes_on_from_the_older_checkpoint_and_its_ledger_is_whole(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    before = await store.list()
    forked = await fork.fork_run(store, target, 4)
    assert (forked.step, forked.epoch) == (4, 1)
    run_log = RunLog(target)
    await run_log.refresh()
    restored = await restore_newest(target, run_log, tmp_path / "restored")
    assert restored.fetched is not None
    assert restored.fetched.commit.step == 4
    verified = await verify.verify_run(target)
    assert verified.problems == ()
    assert verified.steps == 4
    assert await store.list() == before, "the first run is only read"


async def test_a_job_of_another_uid_may_claim_the_fork(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    await fork.fork_run(store, target, 4)
    run_log = RunLog(target)
    await run_log.refresh()
    members = run_log.claims[-1].members
    verdict = runlog_rules.may_claim(
        run_log.claims, members, runlog_rules.Proof(), job_uid="another"
    )
    assert verdict.reason == "FormerJob"


async def test_a_fork_that_was_cut_off_is_taken_up_again(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    cut = UnreliableStore(target)

    async def broken(key: str, body: bytes | memoryview) -> None:
        raise StoreError("cut off")

    cut.create = broken  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        await fork.fork_run(store, cut, 9)
    assert not [k for k in await target.list() if k.startswith("log/")]
    assert (await fork.fork_run(store, target, 9)).step == 9
    assert (await fork.fork_run(store, target, 9)).step == 9


@pytest.mark.parametrize("written", [1, 2])
async def test_a_fork_that_was_cut_off_in_its_log_is_no_run_without_a_checkpoint(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path, written: int
) -> None:
    """A job would take such a run for a new one, and begin at step 0."""
    await a_run_of_two_epochs(store, tmp_path)

    class Cut(UnreliableStore):
        left = written

        async def create(self, key: str, body: bytes | memoryview) -> None:
            if not self.left:
                raise StoreError("cut off")
            self.left -= 1
            await super().create(key, body)

    with pytest.raises(StoreError, match="cut off"):
        await fork.fork_run(store, Cut(target), 9)
    begun = RunLog(target)
    await begun.refresh()
    assert not begun.entries
    with pytest.raises(LogDamaged, match="if an everstep fork to here was interrupted, repeat it"):
        await begun.check_whole()
    await fork.fork_run(store, target, 9)
    assert (await verify.verify_run(target)).ok


@pytest.mark.parametrize(("first", "second"), [(9, 4), (4, 9)])
async def test_what_an_interrupted_fork_of_another_step_has_left_is_no_free_address(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path, first: int, second: int
) -> None:
    """A job could not begin there: it would find a log whose end was deleted."""
    await a_run_of_two_epochs(store, tmp_path)
    cut = UnreliableStore(target)

    async def create_one(key: str, body: bytes | memoryview) -> None:
        await target.create(key, body)
        cut.create = broken  # type: ignore[method-assign]

    async def broken(key: str, body: bytes | memoryview) -> None:
        raise StoreError("cut off")

    cut.create = create_one  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        await fork.fork_run(store, cut, first)
    with pytest.raises(fork.CannotFork, match="an interrupted fork of another step"):
        await fork.fork_run(store, target, second)
    assert log.key(0) not in await target.list("log")
    assert (await fork.fork_run(store, target, first)).step == first


async def test_a_checkpoint_that_the_job_retires_meanwhile_is_said_to_be_retired(
    target: ObjectStore, tmp_path: Path
) -> None:
    """Not that a chunk is gone, as if the store were damaged."""
    store = RetiringStore()
    store.run = run = ARun(store, tmp_path)
    await run.claim(1)
    await run.save(4)
    with pytest.raises(fork.CannotFork, match=r"retired the checkpoint of step 4 .*: pin one"):
        await fork.fork_run(store, target, 4)
    assert await target.list("log") == []


async def test_over_a_slow_connection_the_chunks_are_copied_one_after_the_other(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    await fork.fork_run(NarrowStore(store), target, 9)
    assert (await verify.verify_run(target)).ok


async def test_another_run_is_never_overwritten(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    other = ARun(UnreliableStore(target), tmp_path)
    await other.claim(7)
    with pytest.raises(fork.CannotFork, match="holds another run"):
        await fork.fork_run(store, target, 4)


async def test_a_run_is_not_forked_onto_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with one checkpoint looks like a fork of it that was cut off."""
    run = ARun(UnreliableStore(open_store(f"file://{tmp_path}", "r", {})), tmp_path / "memory")
    await run.claim(1)
    await run.save(4)
    status = await commands.read(
        "fork", f"{tmp_path}/r", {}, step=4, to=f"{tmp_path}/r/", unpin="", as_json=False
    )
    assert status == 2
    assert "this is the old run: choose another address" in capsys.readouterr().err


async def test_a_name_that_no_run_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No job could continue it: `everstep run --run` refuses the name."""
    run = ARun(UnreliableStore(open_store(f"file://{tmp_path}", "r", {})), tmp_path / "memory")
    await run.claim(1)
    await run.save(4)
    to = tmp_path / "second try"
    status = await commands.read(
        "fork", f"{tmp_path}/r", {}, step=4, to=str(to), unpin="", as_json=False
    )
    assert (status, to.exists()) == (2, False)
    assert "--to: the name of a run 'second try'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fork", "fetch"])
async def test_a_step_that_was_not_saved_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = ARun(UnreliableStore(open_store(f"file://{tmp_path}", "r", {})), tmp_path / "memory")
    await run.claim(1)
    await run.save(4)
    to = tmp_path / "new"
    status = await commands.read(
        command, f"{tmp_path}/r", {}, step=5, to=str(to), unpin="", as_json=False
    )
    assert (status, to.exists()) == (2, False)
    assert "there is no checkpoint of step 5; there are: 4" in capsys.readouterr().err


async def test_a_step_that_was_not_saved_is_refused_with_those_that_were(
    store: UnreliableStore, target: ObjectStore, tmp_path: Path
) -> None:
    await a_run_of_two_epochs(store, tmp_path)
    with pytest.raises(fork.CannotFork, match="of step 5; there are: 9, 4"):
        await fork.fork_run(store, target, 5)
