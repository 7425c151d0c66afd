"""Builders of values that the run-log and checkpoint tests share."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep_agent.checkpoint.chunk_upload import Uploader
from everstep_agent.checkpoint.commit import Committed, Committer
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.retention import Read
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import ObjectStore
from everstep_contract.feed import FeedRecord, Order, Segment, encode_records
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Claim, Commit, MemberId
from everstep_contract.manifest import Chunk
from everstep_contract.wire import Staged, StagedTensor

ROWS, COLUMNS = 8, 16
ROW_BYTES = COLUMNS * 4


def member(
    slot: int, attempt: int = 0, incarnation: int = 0, rank: int = 0, life: int = 0
) -> MemberId:
    return MemberId(slot=slot, attempt=attempt, incarnation=incarnation, rank=rank, life=life)


def claim(
    epoch: int,
    slots: Sequence[int | MemberId] = (0, 1),
    *,
    token: str = "",
    job_uid: str = "uid",
    resume: Commit | None = None,
    before: Sequence[Claim] = (),
    cause: str = "Start",
) -> Claim:
    members = tuple(s if isinstance(s, MemberId) else member(s) for s in slots)
    return Claim(
        epoch=epoch,
        token=token or f"token{epoch:03d}-rest",
        members=members,
        coordinator="127.0.0.1:1",
        job_uid=job_uid,
        job="default/job",
        chain=runlog_rules.chain_of(before, resume),
        cause=cause,
    )


def commit(
    epoch: int, step: int, *, token: str = "", manifest: str = "", pins: Sequence[str] = ()
) -> Commit:
    return Commit(
        epoch=epoch,
        token=token or f"token{epoch:03d}-rest",
        step=step,
        manifest=manifest or f"manifests/{epoch}-{step}.json",
        digest="0" * 64,
        pins=tuple(pins),
    )


def entry(step: int, epoch: int = 1, **changes: object) -> LedgerEntry:
    values: dict[str, object] = {
        "epoch": epoch,
        "step": step,
        "feed": "1",
        "samples": tuple(range(4 * step - 4, 4 * step)),
        "counts": (1, 1),
        "weights": (2.0, 2.0),
        "losses": (1.0 / step, 3.0 / step),
        "loss": 2.0 / step,
    }
    return LedgerEntry(**(values | changes))  # type: ignore[arg-type]


def feeds(step: int) -> dict[str, object]:
    """The feed records after `step`: one feed, from which each step drew as in `entry`."""
    order = Order(length=1000, seed=0, shuffle=False)
    segment = Segment(step=1, sample=0, global_batch=4, micro_batch=2, draws=step, order=order)
    return encode_records({"1": FeedRecord(segments=(segment,))})


def content(step: int) -> bytes:
    """The tensor `w` (float32, ROWS x COLUMNS) after `step`."""
    return hashlib.shake_256(str(step).encode()).digest(ROWS * ROW_BYTES)


def stage(folder: Path, *, epoch: int, step: int, rank: int, world: int) -> Staged:
    """Stage one rank's share of the state after `step`: rows of `w`. The lead also stages a tensor
    of its own and the state tree.
    """
    first, last = ROWS * rank // world, ROWS * (rank + 1) // world
    path = folder / f"{epoch}-{step}-{rank}-{world}.staged"
    rows = content(step)[first * ROW_BYTES : last * ROW_BYTES]
    body = rows + b"\0" * (-len(rows) % 64)
    tensors = [
        StagedTensor(
            name="w",
            dtype="float32",
            shape=(ROWS, COLUMNS),
            offsets=(first, 0),
            lengths=(last - first, COLUMNS),
            at=0,
        )
    ]
    if rank == 0:
        tensors.append(
            StagedTensor(name="b", dtype="int64", shape=(), offsets=(), lengths=(), at=len(body))
        )
        body += step.to_bytes(8, "little")
    path.write_bytes(body)
    return Staged(
        epoch=epoch,
        step=step,
        path=str(path),
        tensors=tuple(tensors),
        state={"w": {"$tensor": "w"}, "step": step, "feeds": feeds(step)} if rank == 0 else None,
        lead=rank == 0,
        whole=world == 1,
    )


async def upload(
    store: ObjectStore,
    folder: Path,
    *,
    token: str,
    epoch: int,
    step: int,
    world: int = 2,
    since: int = 0,
) -> list[Part]:
    """Stage and upload every rank's part. The ledger entries start after step `since`."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    entries = [entry(s, epoch) for s in range(since + 1, step + 1)]
    return [
        await Uploader(store, token).upload(
            stage(folder, epoch=epoch, step=step, rank=rank, world=world), rank, entries
        )
        for rank in range(world)
    ]


def read_alone(store: ObjectStore) -> Read:
    """Return a function that reads all chunks alone. In a job, the pods share this work."""

    async def read(_: Commit, chunks: Mapping[int, Chunk]) -> None:
        for chunk in chunks.values():
            await StoreTier(store).check(chunk)

    return read


class ARun:
    """A run as its coordinator drives it: claims and committed saves."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.log = RunLog(store)
        self.committer = Committer(store, self.log, "default/job")
        self.claimed: Claim | None = None

    async def claim(self, epoch: int, resume: Commit | None = None, **changes: object) -> Claim:
        await self.log.refresh()
        before = self.log.claims
        self.claimed = claim(epoch, resume=resume, before=before, **changes)  # type: ignore[arg-type]
        await self.log.append(self.claimed)
        return self.claimed

    async def save(
        self, step: int, *, since: int = 0, world: int = 2, pins: Sequence[str] = ()
    ) -> Commit:
        assert self.claimed
        token, epoch = self.claimed.token, self.claimed.epoch
        parts = await upload(
            self.store, self.folder, token=token, epoch=epoch, step=step, world=world, since=since
        )
        outcome = await self.committer.commit(parts, token=token, world=world, pins=pins)
        assert isinstance(outcome, Committed), outcome
        assert outcome.notes == ()
        return outcome.commit
