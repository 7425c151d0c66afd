"""Saves that were staged, but whose upload was not finished when their agent ended.

A record next to the staged file says what was to be uploaded, so that the agent's successor can do
it. The record is copied to the other tiers as a chunk of the save, so that any pod that finds all
chunks can do it, too. The coordinator decides whether such a save is committed
(`coordinator/unfinished.py`).
"""

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.chunking import BadStaging, plan_chunks
from everstep_agent.checkpoint.files import replace_file
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.tiers import find_problem
from everstep_contract import codec, wire
from everstep_contract.ledger import LedgerEntry
from everstep_contract.manifest import Chunk
from everstep_contract.places import Place

NAME = ".unsent"
"""A record's name is the name of the staged file, followed by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    staged: wire.Staged
    rank: int
    entries: tuple[LedgerEntry, ...] = ()
    """For the lead: the ledger that goes with it."""
    bytes: int = 0
    """Size of the staged file."""
    chunks: tuple[str, ...] = ()
    """Digests of its chunks, in the order of the file."""
    job: str = ""
    """UID of the job that staged it. A job that was deleted and created again may count epochs and steps
    from the start again, so its numbers do not tell its saves from the former job's, which a node's disk
    may still hold. Empty: an older version wrote the record.
    """

    def is_of(self, job: str) -> bool:
        return self.job in ("", job)

    @property
    def key(self) -> tuple[int, int, int, bool]:
        return self.staged.epoch, self.staged.step, self.rank, self.staged.whole


def unsent_of(file: Path) -> Path:
    return file.with_name(file.name + NAME)


def write_unsent(unsent: Unsent) -> dict[str, Place]:
    """Write the record. Returns its digest, and where it is. Raises OSError.

    If the staged file is deleted meanwhile, the record is, too: nobody else would delete it.
    """
    file = Path(unsent.staged.path)
    path, body = unsent_of(file), encode(unsent)
    replace_file(path, body)
    if not file.exists():
        path.unlink(missing_ok=True)
    return {digest.compute(body): Place(path=str(path), start=0, bytes=len(body))}


def encode(unsent: Unsent) -> bytes:
    """As `codec.dumps`, but one entry of the ledger after the other: while one call encodes a large
    document, no other thread of this process runs.
    """
    entries = b",".join(codec.dumps(entry) for entry in unsent.entries)
    head, _, tail = codec.dumps(replace(unsent, entries=())).partition(b'"entries":[')
    return b'%b"entries":[%b%b' % (head, entries, tail)


def read_unsent(staging: Path) -> tuple[Unsent, ...]:
    """The saves that the agent's predecessor left in this folder."""
    found = []
    for path in sorted(staging.glob(f"*{NAME}")):
        file = path.with_name(path.name.removesuffix(NAME))
        with contextlib.suppress(OSError, codec.DecodeError):
            unsent = codec.loads(Unsent, path.read_bytes())
            if file.is_file():
                staged = replace(unsent.staged, path=str(file))
                found.append(replace(unsent, staged=staged))
    return tuple(found)


def read_copied(tier: FolderTier) -> tuple[Unsent, ...]:
    """The saves that pods have copied completely to this tier. They have no staged file yet.

    Raises OSError.
    """
    there = tier.list_now()
    saves = [save for note in tier.read_notes().values() for save in note.saves]
    records = (c for save in saves for c in save.chunks if c.digest in save.unsent)
    found = (_read_record(tier, record) for record in records)
    return tuple(unsent for unsent in found if unsent and there.issuperset(unsent.chunks))


def _read_record(tier: FolderTier, record: Chunk) -> Unsent | None:
    body = tier.read(record.digest, 0, record.bytes)
    if body is None or find_problem(record, body):
        return None
    with contextlib.suppress(codec.DecodeError):
        unsent = codec.loads(Unsent, body)
        return replace(unsent, staged=replace(unsent.staged, path=""))
    return None


def rebuild(unsent: Unsent, tier: FolderTier, path: Path) -> Unsent:
    """Rebuild the staged file at `path` from the chunks in `tier`. Returns the save with this file.

    Raises:
        BadStaging: the chunks are not what was staged.
        OSError: there is no room.
    """
    plans = plan_chunks(unsent.staged.tensors, unsent.bytes)
    if len(plans) != len(unsent.chunks):
        raise BadStaging(f"{len(unsent.chunks)} chunks were copied, not {len(plans)}")
    with path.open("wb") as file:
        os.truncate(file.fileno(), unsent.bytes)
        for plan, name in zip(plans, unsent.chunks, strict=True):
            chunk = Chunk(digest=name, key=name, bytes=plan.end - plan.start)
            body = tier.read(name, 0, chunk.bytes)
            if problem := find_problem(chunk, body):
                raise BadStaging(problem)
            assert body is not None
            os.pwrite(file.fileno(), body, plan.start)
    return replace(unsent, staged=replace(unsent.staged, path=str(path)))
