import asyncio
import contextlib
import io
import itertools
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_run import ARun, claim, commit, entry, feeds, stage, upload
from agent.given import an_epoch
from agent.test_replicas import a_save
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.checkpoint import commit as commits
from everstep_agent.checkpoint import commit_rules, digest
from everstep_agent.checkpoint import ledger as ledgers
from everstep_agent.checkpoint.chunk_upload import Uploader, chunk_key
from everstep_agent.checkpoint.commit import Committed, Committer, NotCommitted
from everstep_agent.checkpoint.commit_rules import (
    BadSave,
    Disagree,
    Drop,
    NotFinite,
    Ready,
    Wait,
    decide_commit,
)
from everstep_agent.checkpoint.cutting import cut_file
from everstep_agent.checkpoint.manifests import fetch_manifest
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator.background import Background
from everstep_agent.coordinator.saves import Saves
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.run_log import Appended, RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Denied, Unreachable
from everstep_agent.tools import verify
from everstep_contract import codec, layout, ledger, log, manifest
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Retire
from everstep_contract.manifest import Chunk, Piece, Tensor
from everstep_contract.units import Mesh

TOKEN = "token001-rest"


@pytest.fixture
def memory() -> ObjectStore:
    return open_store("memory://", "", {})


def part(rank: int, *, step: int = 10, epoch: int = 1, **changes: object) -> Part:
    values = {"lead": rank == 0, "chunks": (Chunk(digest="d", key=f"chunks/{rank}", bytes=1),)}
    return Part(epoch=epoch, step=step, rank=rank, **(values | changes))  # type: ignore[arg-type]


def decide(parts: list[Part], **changes: object) -> Wait | Ready | Drop:
    given = {"epoch": 1, "step": 10, "world": 2, "applied": {0: 10, 1: 12}}
    return decide_commit(parts, **(given | changes))  # type: ignore[arg-type]


def test_a_save_is_ready_when_every_rank_has_stored_its_part_and_is_there() -> None:
    assert decide([part(1), part(0)]) == Ready(parts=(part(0), part(1)))


def test_a_coordinator_keeps_the_save_of_the_whole_though_the_share_comes_later(
    memory: ObjectStore,
) -> None:
    line = logline.Log(io.StringIO())
    saves = Saves(
        Committer(memory, RunLog(memory), "run"),
        on_commit=lambda c: None, background=Background(line), line=line,
    )  # fmt: skip
    for arrived in (part(0, whole=True), part(0), part(0, problem="no room")):
        saves.add(arrived)
        assert saves.has_whole(an_epoch(), 10)
        assert saves.pending(1) == [10]


def test_a_missing_part_is_waited_for_by_name() -> None:
    waiting = decide([part(0)], world=4)
    assert isinstance(waiting, Wait)
    assert waiting.message == "step 10: no part yet from ranks 1, 2, 3"


def test_parts_of_another_epoch_or_step_do_not_count() -> None:
    assert isinstance(decide([part(0), part(1, epoch=2)]), Wait)
    assert isinstance(decide([part(0), part(1, step=11)]), Wait)


def test_a_member_that_has_not_applied_the_step_is_waited_for() -> None:
    waiting = decide([part(0), part(1)], applied={0: 10, 1: 9})
    assert isinstance(waiting, Wait)
    assert waiting.reason == "NotApplied"
    assert "rank 1" in waiting.message


def test_a_whole_part_needs_no_other() -> None:
    whole = part(1, whole=True, lead=True)
    assert decide([part(0, lead=False), whole], applied={}) == Ready(parts=(whole,))


def test_a_whole_unit_needs_no_other_and_its_parts_are_mixed_with_no_others() -> None:
    mesh, shares = Mesh(shard=2), [part(rank) for rank in range(4)]
    first, second = [part(rank, whole=True, lead=rank % 2 == 0) for rank in (2, 3)]
    of_another = part(1, whole=True, lead=False)

    def found(parts: list[Part]) -> Wait | Ready | Drop:
        return decide(parts, world=4, applied={}, mesh=mesh)

    for incomplete in ([first], [first, of_another], [*shares[:3], second], [first, *shares[3:]]):
        assert isinstance(found(incomplete), Wait), incomplete
    assert found([of_another, second, shares[0], first]) == Ready(parts=(first, second))
    assert found([*shares, first]) == Ready(parts=tuple(shares)), (
        "a share of each rank will do, too"
    )


def test_of_any_parts_of_two_units_those_of_one_are_committed_or_a_share_of_each_rank() -> None:
    mesh = Mesh(shard=2)
    shares = [part(rank) for rank in range(4)]
    wholes = [part(rank, whole=True, lead=rank % 2 == 0) for rank in range(4)]
    allowed = (tuple(shares), tuple(wholes[:2]), tuple(wholes[2:]))
    for here in itertools.product([False, True], repeat=8):
        arrived = [p for p, is_here in zip([*shares, *wholes], here, strict=True) if is_here]
        found = decide(arrived, world=4, applied={}, mesh=mesh)
        complete = [parts for parts in allowed if {*parts} <= {*arrived}]
        assert isinstance(found, Ready if complete else Wait), arrived
        assert not isinstance(found, Ready) or found.parts in complete


def test_parts_without_a_lead_are_dropped() -> None:
    dropped = decide([part(0, lead=False), part(1)])
    assert isinstance(dropped, Drop)


def test_parts_of_ranks_that_hold_other_tensors_make_no_checkpoint() -> None:
    def seen(shape: tuple[int, ...]) -> dict[str, object]:
        described = layout.describe([("w", "float32", shape)])
        return {"layout": layout.digest(described), "packed": layout.pack(described)}

    assert isinstance(decide([part(0, **seen((4,))), part(1, **seen((4,)))]), Ready)
    found = decide([part(0, **seen((4,))), part(1, **seen((5,)))])
    assert isinstance(found, commit_rules.Differ)
    assert "no checkpoint of step 10 can be made" in found.message
    assert "tensor w is float32 (4,) on rank 0, float32 (5,) on rank 1" in found.message
    whole = decide([part(0, **seen((4,))), part(1, whole=True, lead=True, **seen((5,)))])
    assert isinstance(whole, Ready), "one rank's full state needs no other part"


def test_a_state_that_is_not_finite_is_not_committed_and_named() -> None:
    names = tuple(f"model/{i}" for i in range(5))
    found = decide([part(0, lead=True, not_finite=names[:2]), part(1, not_finite=names[1:])])
    more = "model/0, model/1, model/2 and 2 more tensors"
    assert found == NotFinite(message=f"NaN or infinite values in {more}")


def test_a_rank_that_is_alone_with_it_is_the_odd_one() -> None:
    parts = a_save(3, {(1, 1): 21})
    parts = [replace(p, lead=p.rank == 0, not_finite=("1.b",) * (p.rank == 1)) for p in parts]
    found = decide_commit(parts, epoch=1, step=10, world=3, applied={0: 10, 1: 10, 2: 10})
    assert isinstance(found, Disagree)
    assert found.difference.ranks == (1,)


def test_a_chunk_that_was_retired_is_given_up() -> None:
    known = LogIndex([claim(1), Retire(epoch=1, token="t", chunks=("chunks/1", "chunks/7"))])
    assert commit_rules.list_given_up([part(0), part(1)], known) == ["chunks/1"]


def test_of_two_keys_of_one_chunk_the_one_that_is_kept_is_used() -> None:
    known = LogIndex([claim(1), Retire(epoch=1, token="t", chunks=("chunks/1", "chunks/7"))])
    used = commit_rules.use_kept([part(0), part(1)], known)
    assert [p.chunks[0].key for p in used] == ["chunks/0", "chunks/0"]
    assert commit_rules.list_given_up(used, known) == []
    alone = commit_rules.use_kept([part(1)], known)
    assert commit_rules.list_given_up(alone, known) == ["chunks/1"], "it has to be stored again"


def rows(first: int, count: int, of: int = 8, dtype: str = "int8") -> tuple[Tensor, ...]:
    piece = Piece(offsets=(first,), lengths=(count,), chunk="d", at=0)
    return (Tensor(name="w", dtype=dtype, shape=(of,), pieces=(piece,)),)


def build(*tensors: tuple[Tensor, ...]) -> manifest.Manifest:
    chunk = Chunk(digest="d", key="chunks/d", bytes=8)
    parts = [part(r, tensors=t, chunks=(chunk,)) for r, t in enumerate(tensors)]
    return commit_rules.build_manifest(parts, run="r", writer=TOKEN, world=len(parts))


def test_the_pieces_of_all_parts_make_the_tensor() -> None:
    (tensor,) = build(rows(4, 4), rows(0, 4)).tensors
    assert [p.offsets for p in tensor.pieces] == [(0,), (4,)]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ((rows(0, 4), rows(5, 3)), "cover 7 bytes of 8"),
        ((rows(0, 4), rows(3, 4)), "two pieces hold"),
        ((rows(0, 4), rows(4, 4, of=9)), "rank 1 has int8 (9,)"),
        ((rows(0, 4), rows(4, 4, dtype="bool")), "rank 1 has bool"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused_by_tensor(
    tensors: tuple[tuple[Tensor, ...], ...], said: str
) -> None:
    with pytest.raises(BadSave) as caught:
        build(*tensors)
    assert "tensor w" in str(caught.value)
    assert said in str(caught.value)


def test_a_commit_extends_the_newest_one_of_its_lineage() -> None:
    first = claim(1)
    second = claim(2, resume=commit(1, 10), before=[first])
    entries = LogIndex([first, commit(1, 10), second])
    own = {"token": second.token}
    assert commit_rules.decide_append(commit(2, 11), entries).ok
    assert commit_rules.decide_append(commit(1, 11, **own), entries).reason == "OffLineage"
    assert commit_rules.decide_append(commit(2, 10), entries).reason == "NotNewer"
    assert commit_rules.decide_append(commit(1, 11), entries).reason == "NewerClaim"


def test_a_save_staged_under_an_older_epoch_may_be_committed_under_a_newer_one() -> None:
    first = claim(1)
    staged = claim(2, resume=commit(1, 20), before=[first])
    assert commit_rules.decide_append(
        commit(1, 15, token=staged.token), LogIndex([first, staged])
    ).ok


# --- with a store


async def test_a_committed_save_stands_in_the_log_with_its_whole_ledger(
    store: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(store, tmp_path)
    await run.claim(1)
    await run.save(3)
    newest = await run.save(5, since=3)
    found = await fetch_manifest(store, newest)
    assert (found.epoch, found.step, found.world, found.writer) == (1, 5, 2, TOKEN)
    assert [(s.first, s.last) for s in found.ledger] == [(1, 3), (4, 5)]
    assert found.parent == run.log.commits[0].manifest
    assert {t.name: len(t.pieces) for t in found.tensors} == {"w": 2, "b": 1}
    assert found.state == {"w": {"$tensor": "w"}, "step": 5, "feeds": feeds(5)}
    for chunk in found.chunks:
        assert len(await store.get(chunk.key)) == chunk.bytes


async def test_a_long_ledger_is_stored_in_several_chunks_and_read_back_whole(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a ledger of hours in which the store took nothing is larger than an object may be."""
    monkeypatch.setattr(ledgers, "CHUNK_SAMPLES", 8)
    run = ARun(store, tmp_path)
    await run.claim(1)
    newest = await run.save(5)
    found = await fetch_manifest(store, newest)
    assert [(s.first, s.last) for s in found.ledger] == [(1, 2), (3, 4), (5, 5)]
    assert len({s.chunk for s in found.ledger}) == 3
    assert (await verify.verify_run(store)).ok


async def test_a_ledger_that_overlaps_the_parents_is_cut_to_what_is_new(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    await run.save(3)
    newest = await run.save(5, since=1)
    assert [(s.first, s.last) for s in (await fetch_manifest(memory, newest)).ledger] == [
        (1, 3),
        (4, 5),
    ]


async def test_a_manifest_that_no_reader_would_accept_is_not_committed(
    memory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_agent.checkpoint.commit.LIMIT_BYTES", 100)
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    with pytest.raises(BadSave, match="its manifest takes"):
        await run.committer.commit(parts, token=TOKEN, world=2)
    assert await memory.list("manifests") == []


async def test_a_gap_in_the_ledger_is_said_and_the_state_saved_all_the_same(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=9, since=4)
    outcome = await run.committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, Committed)
    assert outcome.notes == ("step 9: the ledger has steps 5 to 9 after step 0",)


async def test_a_step_that_another_coordinator_committed_is_told_with_that_commit(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    rival = RunLog(memory)
    await rival.refresh()
    theirs = commit(1, 3, token=TOKEN)
    assert isinstance(await rival.append(theirs), Appended)
    outcome = await run.committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, NotCommitted)
    assert (outcome.reason, outcome.newest) == ("NotNewer", theirs)


async def test_a_rivals_claim_stops_the_commit(memory: ObjectStore, tmp_path: Path) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    rival = RunLog(memory)
    await rival.refresh()
    assert isinstance(await rival.append(claim(2, (0,))), Appended)
    outcome = await run.committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, NotCommitted)
    assert outcome.reason == "NewerClaim"
    assert await memory.list("manifests") == []


async def test_a_rivals_claim_between_manifest_and_entry_stops_it_too(
    memory: ObjectStore, tmp_path: Path
) -> None:
    rival = RunLog(memory)

    class Cut(UnreliableStore):
        async def create(self, key: str, body: bytes | memoryview) -> None:
            await super().create(key, body)
            if key.startswith("manifests/"):
                await rival.refresh()
                await rival.append(claim(2, (0,)))

    run = ARun(Cut(memory), tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    outcome = await run.committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, NotCommitted)
    assert rival.commits == []


@pytest.mark.parametrize("before", ["manifests/", "log/000000000001"])
async def test_a_chunk_that_is_retired_between_manifest_and_entry_stops_it_too(
    memory: ObjectStore, tmp_path: Path, before: str
) -> None:
    """The coordinator's own retirement, which runs beside the commit, or that of another writer."""
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    retire = log.Retire(epoch=1, token=TOKEN, chunks=(parts[0].chunks[0].key,))

    class Cut(UnreliableStore):
        async def create(self, key: str, body: bytes | memoryview) -> None:
            if key.startswith(before):
                writer = run.log if before == "manifests/" else RunLog(memory)
                await writer.refresh()
                await writer.append(retire)
            await super().create(key, body)

    run = ARun(Cut(memory), tmp_path)
    await run.claim(1)
    outcome = await run.committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, NotCommitted)
    assert outcome.reason == "ChunksRetired"
    assert list(run.log.commits) == []


async def test_the_coordinator_goes_on_answering_while_a_manifest_is_built(
    memory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For many ranks and tensors it takes seconds."""
    builders = list[threading.Thread]()

    def build(*args: object, **more: object) -> manifest.Manifest:
        builders.append(threading.current_thread())
        return commit_rules.build_manifest(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commits, "build_manifest", build)
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    await run.committer.commit(parts, token=TOKEN, world=2)
    assert builders
    assert threading.current_thread() not in builders


async def test_a_log_that_takes_no_entry_costs_one_manifest_however_often_it_is_tried(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    store = RefusesEntries(memory)
    committer = Committer(store, RunLog(store), "default/job")
    for seconds in (1.0, 2.0, 3.0):
        with pytest.raises(Denied):
            await committer.commit(parts, token=TOKEN, world=2, seconds={"step": seconds})
        assert len(await memory.list("manifests")) == 1
    store.refuses = False
    outcome = await committer.commit(parts, token=TOKEN, world=2, seconds={"step": 4.0})
    assert isinstance(outcome, Committed)
    assert [outcome.commit.manifest] == await memory.list("manifests")
    assert (await fetch_manifest(memory, outcome.commit)).step == 2


class RefusesEntries(UnreliableStore):
    """A policy allows everything but writes to the log."""

    refuses = True

    async def create(self, key: str, body: bytes | memoryview) -> None:
        if self.refuses and key.startswith("log/"):
            raise Denied(f"cannot write {key}")
        await super().create(key, body)


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_a_commit_whose_answer_was_lost_is_found_again(
    memory: ObjectStore, tmp_path: Path, fails_at: int
) -> None:
    class LosesAnswer(UnreliableStore):
        creates = 0

        async def create(self, key: str, body: bytes | memoryview) -> None:
            await super().create(key, body)
            self.creates += 1
            if self.creates == fails_at + 1:
                raise Unreachable("the answer was lost")

    run = ARun(memory, tmp_path)
    await run.claim(1)
    parts = await upload(memory, tmp_path, token=TOKEN, epoch=1, step=2)
    bad = LosesAnswer(memory)
    run_log = RunLog(bad)
    committer = Committer(bad, run_log, "default/job")
    with pytest.raises(Unreachable):
        await committer.commit(parts, token=TOKEN, world=2)
    outcome = await committer.commit(parts, token=TOKEN, world=2)
    assert isinstance(outcome, Committed)
    assert [c.step for c in run_log.commits] == [2]
    assert await memory.list("log") == [log.key(0), log.key(1)]


async def test_a_save_taken_again_does_not_write_over_the_manifest_of_the_dropped_one(
    memory: ObjectStore, tmp_path: Path
) -> None:
    run = ARun(memory, tmp_path)
    await run.claim(1)
    name = "manifests/00000001-0000000002-token001.json"
    await memory.create(name, b"of a save that was dropped")
    committed = await run.save(2)
    assert committed.manifest == name.replace(".json", "-2.json")
    assert await memory.get(name) == b"of a save that was dropped"


async def test_chunks_of_a_save_that_was_read_back_are_sent_once(
    memory: ObjectStore, tmp_path: Path
) -> None:
    watched = UnreliableStore(memory)
    uploader = Uploader(watched, TOKEN)
    first = stage(tmp_path, epoch=1, step=1, rank=1, world=2)
    again = replace(first, step=2)
    one = await uploader.upload(first, 1)
    two = await uploader.upload(again, 1)
    assert one.chunks[0].key != two.chunks[0].key
    uploader.committed(1, 2)
    three = await uploader.upload(replace(first, step=3), 1)
    assert three.chunks[0].key != two.chunks[0].key, "the store may have lost it"
    uploader.verified(1, 2)
    four = await uploader.upload(replace(first, step=4), 1)
    assert four.chunks == two.chunks
    assert len(watched.calls) == 3


async def test_the_event_loop_does_not_encode_the_ledger(
    memory: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes 2 s for 5,000 steps of 1,024 samples, and the lead's agent often coordinates."""
    encoded, encode = list[threading.Thread](), ledger.encode_lines

    def note(entries: Iterable[LedgerEntry]) -> bytes:
        encoded.append(threading.current_thread())
        return encode(entries)

    monkeypatch.setattr(ledger, "encode_lines", note)
    staged = stage(tmp_path, epoch=1, step=2, rank=0, world=1)
    await Uploader(memory, TOKEN).upload(staged, 0, [entry(1), entry(2)])
    assert encoded
    assert threading.current_thread() not in encoded


async def test_a_part_survives_the_wire(memory: ObjectStore, tmp_path: Path) -> None:
    sent = await Uploader(memory, TOKEN).upload(
        stage(tmp_path, epoch=1, step=2, rank=0, world=1), 0, [entry(1), entry(2), entry(3)]
    )
    assert codec.loads(Part, codec.dumps(sent)) == sent
    assert [(s.first, s.last) for s in sent.ledger] == [(1, 2)]
    assert all(c.key == chunk_key(TOKEN, 2, c.digest) for c in sent.chunks)
    assert sent.bytes == sum(c.bytes for c in sent.chunks) > 0


async def test_a_large_share_goes_up_in_many_chunks(memory: ObjectStore, tmp_path: Path) -> None:
    staged = stage(tmp_path, epoch=1, step=2, rank=0, world=1)
    cuts = await cut_file(staged, 192)
    sent = await Uploader(memory, TOKEN, concurrency=2).upload(staged, 0, cuts=cuts)
    assert len(sent.chunks) > 3
    assert all(c.bytes <= 192 for c in sent.chunks)
    body = Path(staged.path).read_bytes()  # noqa: ASYNC240
    for cut in cuts:
        held = body[cut.place.start : cut.place.start + cut.place.bytes]
        assert digest.compute(held) == cut.digest
    assert {cut.digest for cut in cuts} == {chunk.digest for chunk in sent.chunks}


class SlowStore(UnreliableStore):
    """Several chunks that are sent at once take too long."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.under_way, self.taken = 0, list[str]()

    async def put(self, key: str, body: bytes | memoryview) -> None:
        self.under_way += 1
        try:
            await asyncio.sleep(0)
            if self.under_way > 1:
                raise Unreachable(f"{key}: no answer in time")
            await super().put(key, body)
            self.taken.append(key)
        finally:
            self.under_way -= 1


async def test_a_store_that_is_too_slow_for_several_chunks_at_once_gets_a_save_at_last(
    memory: ObjectStore, tmp_path: Path
) -> None:
    slow = SlowStore(memory)
    staged = stage(tmp_path, epoch=1, step=2, rank=0, world=1)
    cuts = await cut_file(staged, 192)
    uploader = Uploader(slow, TOKEN)
    for _ in range(4 * len(cuts)):
        with contextlib.suppress(Unreachable):
            part = await uploader.upload(staged, 0, cuts=cuts)
            break
    else:
        pytest.fail("each try began anew")
    assert {cut.digest for cut in cuts} == {chunk.digest for chunk in part.chunks}
    assert len(slow.taken) == len(set(slow.taken)) == len(cuts)


async def test_an_upload_that_fails_leaves_no_task_behind(
    memory: ObjectStore, tmp_path: Path
) -> None:
    away = UnreliableStore(memory)
    away.away = True
    staged = stage(tmp_path, epoch=1, step=2, rank=0, world=1)
    with pytest.raises(Unreachable):
        await Uploader(away, TOKEN).upload(staged, 0, cuts=await cut_file(staged, 192))
