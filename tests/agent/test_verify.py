import gc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_run import ARun, entry
from agent.restored import fetch
from agent.retiring import RetiringStore
from agent.unreliable import NarrowStore, UnreliableStore
from everstep_agent.storage import open_store
from everstep_agent.tools import proof, verify
from everstep_contract import log
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Done


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


async def a_disturbed_run(store: UnreliableStore, folder: Path) -> ARun:
    """Epoch 1 takes the steps 1 to 6; epoch 2 resumes after step 4 and ends the run with step 9."""
    run = ARun(store, folder)
    await run.claim(1)
    saved = await run.save(4)
    await run.save(6, since=4)
    await run.claim(2, resume=saved, cause="WorkerDied")
    await run.save(9, since=4, world=1)
    assert run.claimed
    await run.log.append(Done(epoch=2, token=run.claimed.token, step=9))
    return run


async def test_the_run_that_exists_is_proved_not_the_tries(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    await a_disturbed_run(bad_day, tmp_path)
    verified = await verify.verify_run(bad_day, entries=True)
    assert verified.problems == ()
    assert [(e.epoch, e.step) for e in verified.entries] == [
        *((1, s) for s in range(1, 5)),
        *((2, s) for s in range(5, 10)),
    ]
    assert [e.loss for e in verified.entries] == [2.0 / s for s in range(1, 10)]
    assert verified.entries[0].samples == (0, 1, 2, 3)
    assert verified.done
    assert [(s.epoch, s.first, s.last, s.cause, s.samples) for s in verified.epochs] == [
        (1, 1, 4, "Start", 16),
        (2, 5, 9, "WorkerDied", 20),
    ]
    assert await verify.load_ledger(bad_day) == list(verified.entries)
    assert verify.exit_code(verified) == 0


async def test_over_a_slow_connection_the_chunks_are_read_one_after_the_other(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    await a_disturbed_run(bad_day, tmp_path)
    assert (await verify.verify_run(NarrowStore(bad_day))).ok


async def test_the_table_says_what_was_proved(bad_day: UnreliableStore, tmp_path: Path) -> None:
    await a_disturbed_run(bad_day, tmp_path)
    lines = verify.build_table(await verify.verify_run(bad_day)).splitlines()
    assert lines[1] == "newest  epoch 2, step 9 (done), 2 checkpoints kept"
    assert lines[-1] == (
        "ok      steps 1 to 9 once each, 36 samples, none lost or repeated, every micro-batch "
        "by exactly one rank"
    )


async def test_a_run_without_a_checkpoint_proves_nothing(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    empty = await verify.verify_run(bad_day)
    assert "there is no run; give the address STORE/NAME" in empty.problems[0]
    assert verify.exit_code(empty) == 1
    await ARun(bad_day, tmp_path).claim(1)
    assert "no checkpoint yet" in (await verify.verify_run(bad_day)).problems[0]
    assert await verify.load_ledger(bad_day) == []


async def test_a_damaged_entry_of_the_log_is_a_problem(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    """Not a command that could not be carried out, as when the store does not answer."""
    await a_disturbed_run(bad_day, tmp_path)
    await bad_day.put(log.key(2), b"{}")
    verified = await verify.verify_run(bad_day)
    assert "log/000000000002.json" in verified.problems[0]
    assert verify.exit_code(verified) == 1


async def test_a_corrupt_chunk_of_the_state_is_named(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = await a_disturbed_run(bad_day, tmp_path)
    fetched = await fetch(bad_day, run.log.commits[-1], tmp_path / "look")
    bad_day.corrupt = {next(iter(fetched.needed.values())).key}
    verified = await verify.verify_run(bad_day)
    assert "is corrupt" in verified.problems[0]
    assert verify.build_table(verified).splitlines()[-1].startswith("PROBLEM chunks/")
    assert (await verify.verify_run(bad_day, state=False)).ok


async def test_what_was_damaged_on_its_way_is_read_again(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    await a_disturbed_run(bad_day, tmp_path)
    bad_day.corrupt_once = set(await bad_day.list())
    assert (await verify.verify_run(bad_day)).ok


async def test_an_end_beyond_the_newest_checkpoint_is_a_problem(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run = ARun(bad_day, tmp_path)
    claimed = await run.claim(1)
    await run.save(4)
    await run.log.append(Done(epoch=1, token=claimed.token, step=6))
    verified = await verify.verify_run(bad_day)
    assert verified.problems == ("the run ended at step 6, its newest checkpoint is step 4",)


class Watched(UnreliableStore):
    """Counts the entries in memory whenever a chunk is read."""

    most = 0

    async def get(self, key: str) -> bytes:
        if key.startswith("chunks/"):
            self.most = max(self.most, count_entries())
        return await super().get(key)


def count_entries() -> int:
    return sum(type(o) is LedgerEntry for o in gc.get_objects())


async def test_a_long_ledger_is_not_held_in_memory(tmp_path: Path) -> None:
    store = Watched(open_store("memory://", "", {}))
    run = ARun(store, tmp_path)
    await run.claim(1)
    for step in range(2, 21, 2):
        await run.save(step, since=step - 2)
    before = count_entries()
    store.most = 0
    verified = await verify.verify_run(store)
    assert (verified.problems, verified.steps, verified.entries) == ((), 20, ())
    assert store.most - before <= 2


def find_problems(entries: Iterable[LedgerEntry], steps: int) -> list[str]:
    found = proof.Steps()
    for one in entries:
        found.add(one)
    return found.problems(steps)


def test_each_step_must_stand_once() -> None:
    good = [entry(1), entry(2), entry(2, reduction=1)]
    assert find_problems(good, 2) == []
    assert find_problems([entry(1), entry(3)], 3) == ["step 2 is missing from the ledger"]
    assert find_problems([entry(1), entry(1)], 1) == ["step 1 is 2 times in the ledger"]
    assert find_problems([], 1) == ["step 1 is missing from the ledger"]


def test_each_micro_batch_must_come_from_one_rank() -> None:
    for count in (0, 2):
        odd = replace(entry(1), counts=(1, count))
        assert find_problems([odd], 1) == [f"step 1: micro-batch 1 came from {count} ranks, not 1"]


def test_two_reductions_of_a_step_must_see_the_same_samples() -> None:
    other = replace(entry(1, reduction=1), samples=(1, 2, 3, 4))
    assert find_problems([entry(1), other], 1) == [
        "step 1: its loops over feed 1 saw different samples"
    ]


async def test_if_the_job_retires_the_checkpoint_meanwhile_the_next_one_is_verified(
    tmp_path: Path,
) -> None:
    store = RetiringStore()
    store.run = run = ARun(store, tmp_path)
    await run.claim(1)
    await run.save(4)
    verified = await verify.verify_run(store)
    assert (verified.problems, verified.steps, verified.commits) == ((), 5, 1)
