"""Model of retention: what is committed must stay readable until it is retired. It covers chunks,
commits, retirement, late deletions and listings that lag. The rules are the runtime's own; the
content of a step repeats every other step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from everstep_agent.checkpoint.chunk_upload import chunk_key
from everstep_agent.checkpoint.commit_rules import decide_append
from everstep_agent.checkpoint.retention_rules import build_retire, choose_garbage, choose_retired
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Claim, Commit, Entry, MemberId, Retire
from simulation.protocol.rules import Move
from simulation.protocol.world import keep, list_entries

LAST = 3
DIGESTS = ("0" * 64, "1" * 64)


class Writer(NamedTuple):
    """An agent that coordinates, saves and deletes old data, all in one."""

    token: str = ""
    epoch: int = 0
    read: int = 0
    step: int = 0
    staged: str = ""
    """Key of the chunk that it has uploaded for `step`."""
    listed: frozenset[str] | None = None
    """A listing of the store, which it requests once."""


class Shelf(NamedTuple):
    log: tuple[int, ...] = ()
    keys: frozenset[str] = frozenset()
    doomed: frozenset[str] = frozenset()
    """Keys that a `retire` entry names: anyone may delete them, at any time."""
    named: frozenset[tuple[str, str]] = frozenset()
    """(manifest, chunk): the chunks that each manifest names."""
    writers: tuple[Writer, ...] = ()
    deletions: int = 3
    crashes: int = 1


class Shelves:
    """`keyed` False: a variant whose chunk keys contain neither claim nor step."""

    def __init__(self, *, keyed: bool = True) -> None:
        self.keyed = keyed

    def start(self, writers: int, crashes: int = 1) -> Shelf:
        return Shelf(writers=(Writer(),) * writers, crashes=crashes)

    def is_done(self, world: Shelf) -> bool:
        newest = LogIndex(list_entries(world.log)).newest_resumable
        return newest is not None and newest.step >= LAST and not world.doomed

    def check(self, before: Shelf, move: Move) -> str:
        after: Shelf = move.after
        for commit in LogIndex(list_entries(after.log)).standing:
            lost = [c for m, c in after.named if m == commit.manifest and c not in after.keys]
            if lost:
                return (
                    f"step {commit.step} is committed and not retired, its chunk {lost[0]} is gone"
                )
        return ""

    def moves(self, world: Shelf) -> list[Move]:
        found: list[Move] = []
        for i, writer in enumerate(world.writers):
            if writer.read < len(world.log):
                read = writer._replace(read=len(world.log))
                found.append(Move("reads the log", i, None, _with(world, i, read)))
                continue
            found += self._save(world, i, writer)
            found += self._tidy(world, i, writer)
        for key in sorted(world.doomed):
            rest = world.doomed - {key}
            gone = world._replace(keys=world.keys - {key}, doomed=rest)
            found.append(Move("is deleted", key[:16], None, gone))
        return found

    def events(self, world: Shelf) -> list[Move]:
        """A deletion that arrives late or twice; a writer that is lost with what it held."""
        found = []
        for i, writer in enumerate(world.writers):
            if world.crashes and writer.token:
                lost = _with(world, i, Writer())._replace(crashes=world.crashes - 1)
                found.append(Move("is lost", i, None, lost))
        retired = {c for e in LogIndex(list_entries(world.log)).retires for c in e.chunks}
        for key in sorted(retired - world.doomed):
            if world.deletions:
                again = world._replace(doomed=world.doomed | {key}, deletions=world.deletions - 1)
                found.append(Move("is deleted once more, later", key[:16], None, again))
        return found

    def _save(self, world: Shelf, i: int, writer: Writer) -> Iterator[Move]:
        entries = list_entries(world.log)
        newest = runlog_rules.newest_claim(entries)
        if newest is None or newest.token != writer.token:
            yield _claim(world, i)
            return
        if writer.staged:
            yield from self._commit(world, i, writer, entries)
            return
        last = LogIndex(entries).newest_resumable
        step = (last.step if last else 0) + 1
        if step <= LAST:
            digest = DIGESTS[step % 2]
            key = chunk_key(writer.token, step, digest) if self.keyed else f"chunks/{digest}"
            staged = _with(world, i, writer._replace(step=step, staged=key))
            yield Move("uploads step", i, step, staged._replace(keys=world.keys | {key}))

    def _commit(
        self, world: Shelf, i: int, writer: Writer, entries: tuple[Entry, ...]
    ) -> Iterator[Move]:
        entry = _build_commit(writer)
        done = writer._replace(staged="")
        if not decide_append(entry, LogIndex(entries)).ok:
            yield Move("drops step", i, writer.step, _with(world, i, done))
            return
        named = world.named | {(entry.manifest, writer.staged)}
        after = _with(_append(world, entry), i, done._replace(read=len(world.log) + 1))
        yield Move("commits step", i, writer.step, after._replace(named=named))

    def _tidy(self, world: Shelf, i: int, writer: Writer) -> Iterator[Move]:
        """Retention, and garbage collection of uncommitted chunks, with a listing of any age."""
        if writer.listed is None and writer.token:
            listed = _with(world, i, writer._replace(listed=world.keys))
            yield Move("lists the store", i, None, listed)
        known = LogIndex(list_entries(world.log))
        claim, standing = known.newest_claim, known.standing
        if claim is None or claim.token != writer.token:
            return
        chosen = choose_retired(known, {c.manifest for c in known.commits}, keep=1)
        if chosen:
            pairs = [(c, _list_chunks(world, c)) for c in chosen]
            kept = {k for c in standing if c not in chosen for k in _list_chunks(world, c)}
            entry = build_retire(writer.token, writer.epoch, pairs, kept)
            yield Move("retires", i, len(pairs), _retired(world, i, writer, entry))
        newest = known.newest_resumable
        if newest is None or writer.listed is None:
            return
        named = {c for m, c in world.named if m in {k.manifest for k in standing}}
        garbage = choose_garbage(writer.listed, named, known, newest.step).chunks
        if garbage:
            entry = Retire(epoch=writer.epoch, token=writer.token, chunks=tuple(sorted(garbage)))
            after = _retired(world, i, writer._replace(listed=frozenset()), entry)
            yield Move("collects", i, len(garbage), after)


def _claim(world: Shelf, i: int) -> Move:
    known = LogIndex(list_entries(world.log))
    epoch, commit = known.next_epoch, known.newest_resumable
    claim = Claim(
        epoch=epoch,
        token=f"{i}{epoch}",
        members=(MemberId(slot=i, attempt=epoch, incarnation=1, rank=0, life=1),),
        coordinator="",
        job_uid="job",
        job="",
        chain=runlog_rules.chain_of(known.claims, commit),
    )
    listed = world.writers[i].listed
    writer = Writer(token=claim.token, epoch=epoch, read=len(world.log) + 1, listed=listed)
    return Move("claims", i, epoch, _with(_append(world, claim), i, writer))


def _build_commit(writer: Writer) -> Commit:
    return Commit(
        epoch=writer.epoch,
        token=writer.token,
        step=writer.step,
        manifest=f"manifests/{writer.epoch:08d}-{writer.step:010d}-{writer.token}.json",
        digest="",
    )


def _list_chunks(world: Shelf, commit: Commit) -> set[str]:
    return {chunk for manifest, chunk in world.named if manifest == commit.manifest}


def _append(world: Shelf, entry: Entry) -> Shelf:
    return world._replace(log=(*world.log, keep(entry)))


def _retired(world: Shelf, i: int, writer: Writer, entry: Retire) -> Shelf:
    after = _with(_append(world, entry), i, writer._replace(read=len(world.log) + 1))
    return after._replace(doomed=world.doomed | set(entry.chunks))


def _with(world: Shelf, i: int, writer: Writer) -> Shelf:
    return world._replace(writers=(*world.writers[:i], writer, *world.writers[i + 1 :]))
