"""Pinned checkpoints: which name a commit gets, what retention keeps, and how a name is removed."""

import io
import json
from pathlib import Path

import pytest

from agent.a_run import ARun, claim, commit, read_alone
from agent.gang import Gang, assert_exact
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint.commit import Committer
from everstep_agent.checkpoint.manifests import fetch_manifest
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.pin_rules import NoPin, build_unpin, find_pinned
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.checkpoint.retention_rules import choose_retired
from everstep_agent.coordinator import due_saves
from everstep_agent.coordinator.background import Background
from everstep_agent.coordinator.pins import Pins
from everstep_agent.coordinator.saves import Saves
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.run_log import Appended, LogDamaged, RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.tools import fork
from everstep_agent.tools import pins as tool
from everstep_agent.tools.verify import verify_run
from everstep_contract import log
from everstep_contract.names import find_pin_problem

UNPIN = log.Retire(epoch=1, token="token001-rest", unpins=("first",))


def a_log(*more: log.Entry) -> list[log.Entry]:
    return [claim(1), commit(1, 2, pins=["first"]), commit(1, 4), commit(1, 6), *more]


def retired(entries: list[log.Entry]) -> list[int]:
    good = {c.manifest for c in entries if isinstance(c, log.Commit)}
    return [c.step for c in choose_retired(LogIndex(entries), good, 1)]


# --- by value


def test_a_pinned_checkpoint_stays_until_its_name_is_given_up() -> None:
    assert retired(a_log()) == [4]
    assert retired(a_log(UNPIN)) == [2, 4]


def test_it_stays_while_one_of_its_names_does() -> None:
    entries = [claim(1), commit(1, 2, pins=["first", "other"]), commit(1, 4), UNPIN]
    assert retired(entries) == []


def test_a_name_is_given_up_under_the_newest_claim_once() -> None:
    assert build_unpin(LogIndex(a_log()), "first") == UNPIN
    assert build_unpin(LogIndex(a_log(UNPIN)), "first") is None
    with pytest.raises(NoPin, match="no checkpoint is pinned as 'last'; pinned are: first"):
        build_unpin(LogIndex(a_log()), "last")


def test_a_name_that_was_given_up_still_shows_its_checkpoint() -> None:
    found = find_pinned("first", LogIndex(a_log(UNPIN)))
    assert found is not None
    assert (found.step, found.manifest, found.kept) == (2, "manifests/1-2.json", False)
    assert find_pinned("other", LogIndex(a_log())) is None


def test_a_reader_that_knows_no_pins_can_read_the_log() -> None:
    """An older reader ignores unknown fields, but not unknown kinds of entries. So pins add no kind."""
    raw = json.loads(log.encode(commit(1, 2, pins=["first"])))
    assert (raw["kind"], raw.pop("pins")) == ("commit", ["first"])
    assert log.decode(json.dumps(raw)) == commit(1, 2)
    assert log.decode(log.encode(UNPIN)) == UNPIN


def test_a_name_goes_to_the_first_checkpoint_that_ends_after_it_was_asked_for() -> None:
    index, pins = LogIndex(a_log()), Pins()
    pins.want("now", 8)
    assert pins.ask(["epoch-1"], 9, index) == []
    assert [pins.list_due(step, index) for step in (7, 8, 9)] == [[], ["now"], ["epoch-1", "now"]]


def test_a_wish_of_the_operator_that_was_withdrawn_is_forgotten_and_the_scripts_is_not() -> None:
    index, pins = LogIndex(a_log()), Pins()
    pins.want("now", 8)
    pins.ask(["epoch-1"], 8, index)
    pins.want("", 9)
    assert pins.list_due(9, index) == ["epoch-1"]
    pins.pinned(["epoch-1"])
    assert pins.list_due(9, index) == []


def test_a_name_is_used_once_even_if_it_was_given_up() -> None:
    index, pins = LogIndex(a_log(UNPIN)), Pins()
    pins.want("first", 8)
    (note,) = pins.ask(["first"], 8, index)
    assert note.startswith("step 8 is not pinned as first: the run has pinned step 2")
    assert pins.list_due(8, index) == []
    assert pins.ask(["first"], 2, index) == [], "a repeated request must not be reported"


def test_a_name_that_stays_with_a_checkpoint_that_the_run_left_is_reported() -> None:
    """The run went back to step 4, and saves step 6 again; the name of the former step 6 does not move."""
    left, kept = commit(1, 6, pins=["best"]), commit(1, 4)
    index, pins = LogIndex([claim(1), kept, left]), Pins()
    assert pins.ask(["best"], 6, index) == []
    index.add(claim(2, resume=kept, before=[claim(1)]))
    (note,) = pins.ask(["best"], 6, index)
    assert note.startswith("step 6 is not pinned as best: this name stays with the checkpoint")
    assert pins.list_due(6, index) == []


async def test_a_name_that_is_used_already_is_noted_once_not_once_for_each_rank() -> None:
    store, line = open_store("memory://", "", {}), logline.Log(io.StringIO())
    run_log = RunLog(store)
    for made in a_log():
        assert isinstance(await run_log.append(made), Appended)
    saves = Saves(
        Committer(store, run_log, "r"),
        on_commit=lambda *_: None, background=Background(line), line=line,
    )  # fmt: skip
    for rank in range(4):
        saves.add(Part(epoch=1, step=8, rank=rank, pins=("first",)))
    (note,) = saves.notes
    assert note.startswith("step 8 is not pinned as first")


@pytest.mark.parametrize("name", ["a", "epoch-12", "0", "a" * 63])
def test_a_dns_label_is_a_name(name: str) -> None:
    assert find_pin_problem(name) == ""


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a" * 64, "a.b", "a/b", "a\n", "é", 7, None])
def test_anything_else_is_refused_with_the_rule(name: object) -> None:
    assert "use at most 63 lower-case letters" in find_pin_problem(name)


# --- with a store


@pytest.fixture
def store() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


async def saved(store: ObjectStore, folder: Path) -> ARun:
    """A run with checkpoints of the steps 2 (pinned), 4 and 6."""
    run = ARun(store, folder)
    await run.claim(1)
    await run.save(2, pins=["first"])
    await run.save(4, since=2)
    await run.save(6, since=4)
    return run


async def tidy(run: ARun, keep: int = 1) -> Retention:
    assert run.claimed
    await run.log.refresh()
    retention = Retention(run.store, run.log, keep=keep)
    for one in run.log.index.standing:
        await retention.check(one, read_alone(run.store))
    await retention.retire(run.claimed.token)
    return retention


async def test_retention_keeps_the_chunks_of_a_pin_until_it_is_given_up(
    store: UnreliableStore, tmp_path: Path
) -> None:
    run = await saved(store, tmp_path)
    await tidy(run)
    newest, pinned = run.log.index.resumable()
    assert (newest.step, pinned.step) == (6, 2)
    only = await chunks_of(store, pinned) - await chunks_of(store, newest)
    assert only <= set(await store.list())
    target = open_store("memory://", "", {})
    assert (await fork.fork_run(store, target, 2)).step == 2, "all of its chunks are kept"
    given_up = await tool.unpin(store, "first")
    assert (given_up.step, given_up.before) == (2, False)
    await tidy(run)
    assert [c.step for c in run.log.index.resumable()] == [6]
    assert not only & set(await store.list())
    assert (await verify_run(store)).ok


async def chunks_of(store: ObjectStore, commit: log.Commit) -> set[str]:
    return {c.key for c in (await fetch_manifest(store, commit)).chunks}


async def test_a_fork_does_not_take_the_pins_along(store: UnreliableStore, tmp_path: Path) -> None:
    await saved(store, tmp_path)
    target = open_store("memory://", "", {})
    await fork.fork_run(store, target, 2)
    assert (await fork.list_checkpoints(target)).pins == ()


async def test_the_list_names_the_pins(store: UnreliableStore, tmp_path: Path) -> None:
    await saved(store, tmp_path)
    catalog = await fork.list_checkpoints(store)
    assert [(c.step, c.pins) for c in catalog.checkpoints] == [(6, ()), (4, ()), (2, ("first",))]
    assert fork.build_table(catalog).splitlines()[-1].split()[-1] == "first"


async def test_unpinning_meets_a_coordinator_that_takes_the_same_place(
    store: UnreliableStore, tmp_path: Path
) -> None:
    run = await saved(store, tmp_path)
    log_of_the_tool = RunLog(store)
    await log_of_the_tool.refresh()
    entry = build_unpin(log_of_the_tool.index, "first")
    assert entry is not None
    await log_of_the_tool.append(entry)
    # The coordinator has not read the tool's entry and appends after it.
    await run.save(8, since=6)
    assert [type(e).__name__ for e in run.log.entries[-2:]] == ["Retire", "Commit"]
    again = await tool.unpin(store, "first")
    assert again.before
    assert tool.describe(again) == "first (step 2) was unpinned before"


async def test_no_pin_is_given_up_in_the_place_of_an_entry_that_was_deleted(
    store: UnreliableStore, tmp_path: Path
) -> None:
    """Nobody would notice the loss of that entry any more."""
    run = await saved(store, tmp_path)
    gone = log.key(len(run.log.entries) - 2)
    await store.delete(gone)
    with pytest.raises(LogDamaged, match=f"{gone} is gone"):
        await tool.unpin(store, "first")
    assert gone not in await store.list("log")


async def test_a_pin_that_cannot_be_read_stops_deletion_and_says_what_to_do(
    store: UnreliableStore, tmp_path: Path
) -> None:
    run = await saved(store, tmp_path)
    await store.delete(run.log.commits[0].manifest)
    retention = await tidy(run)
    assert retention.blocked.endswith("that of step 2, pinned as first, cannot be read: unpin it")
    assert len(run.log.index.standing) == 3
    await tool.unpin(store, "first")
    assert (await tidy(run)).blocked == ""
    assert [c.step for c in run.log.index.standing] == [6]


# --- with agents


async def test_the_operator_asks_for_a_checkpoint_and_sees_it(tmp_path: Path) -> None:
    gang = Gang(tmp_path, keep=1)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        begun = await gang.until(lambda s: s.step >= 3)
        gang.want(pin="before-lunch")
        pinned = (await gang.until(lambda s: s.pinned)).pinned
        assert pinned is not None
        assert (pinned.name, pinned.kept) == ("before-lunch", True)
        assert begun.step < pinned.step < 60
        await gang.reports()
        index = (await gang.run_log()).index
        assert index.pins["before-lunch"].manifest == pinned.manifest
        assert len([c for c in index.commits if c.pins]) == 1, "the repeated request pins once"
        await assert_exact(gang, 60)


async def test_a_script_pins_the_step_that_it_names(tmp_path: Path) -> None:
    gang = Gang(tmp_path, save_every_steps=20, keep=1)  # a save soon after 7 may displace it
    gang.stub |= {"STUB_UNTIL": "40", "STUB_PIN": "7:epoch-1"}
    async with gang:
        await gang.reports()
        index = (await gang.run_log()).index
        assert {n: c.step for n, c in index.pins.items()} == {"epoch-1": 7}
        steps = {c.step for c in index.commits}
        assert steps <= {7, 20, 40}, "only step 7 is saved besides"


async def test_if_the_save_that_a_script_pins_fails_a_later_one_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_saves, "PIN_SECONDS", 0.1)
    gang = Gang(tmp_path)
    flag = tmp_path / "had-no-room"
    gang.stub |= {"STUB_UNTIL": "60", "STUB_PIN": "7:epoch-1", "STUB_MODE": f"noroom:{flag}"}
    async with gang:
        await gang.reports()
        (commit,) = (await gang.run_log()).index.pins.values()
        assert 7 < commit.step < 60


async def test_a_name_that_is_given_up_at_the_very_end_does_not_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = Gang(tmp_path)
    gang.stub["STUB_PIN"] = "7:epoch-1"
    take, met = RunLog._take, []

    async def unpin_first(self: RunLog, place: int, entry: log.Entry) -> object:
        if isinstance(entry, log.Done) and not met:
            met.append(await tool.unpin(gang.store(), "epoch-1"))
        return await take(self, place, entry)

    monkeypatch.setattr(RunLog, "_take", unpin_first)
    async with gang:
        await gang.reports()
        run_log = await gang.run_log()
    assert [type(e).__name__ for e in run_log.entries[-2:]] == ["Retire", "Done"]
    assert len(run_log.claims) == 1
