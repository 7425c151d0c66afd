"""`everstep verify RUN`: proves from the store alone how the run was made.

Walks the lineage of the newest commit and checks that every step 1 … N occurs exactly once, that
exactly one rank contributed each micro-batch, that no sample is lost or repeated in any pass over
the data, that the order did not change, and that the digests of the checkpoint's chunks match. It
does not recompute losses.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from everstep_agent.checkpoint import ledger as ledgers
from everstep_agent.checkpoint.bounded import move_all
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.restore import fetch_verified
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.runlog.run_log import LogDamaged, RunLog
from everstep_agent.storage.store import ObjectStore
from everstep_agent.tools import feed_proof, proof
from everstep_contract import codec, feed, ledger
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Commit
from everstep_contract.manifest import LedgerSegment, Manifest

CONCURRENCY = 4
TRIES = 3
"""How often it begins again because the job retired the checkpoint that was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    run: str
    """The run's address."""
    problems: tuple[str, ...]
    """Most important first; empty: everything that can be proved is proved."""
    notes: tuple[str, ...] = ()
    """Edits of the feeds that changed no sample, and what cannot be proved about an iterable
    dataset.
    """
    steps: int = 0
    epochs: tuple[proof.Segment, ...] = ()
    entries: tuple[LedgerEntry, ...] = ()
    """The ledger, if it was asked for."""
    commit: Commit | None = None
    commits: int = 0
    """Number of existing checkpoints."""
    bytes: int = 0
    done: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


async def load_ledger(store: ObjectStore) -> list[LedgerEntry]:
    """The ledger along the lineage of the newest commit, in order of step; empty before the first
    commit.

    Raises:
        Broken: the manifest or a chunk of the ledger is missing or was changed.
        StoreError: the store failed to answer.
    """
    log = RunLog(store)
    await log.refresh()
    commit = log.index.newest_resumable
    if commit is None:
        return []
    found: list[LedgerEntry] = []
    await _walk(store, await fetch_manifest(store, commit), found.append)
    return found


async def _walk(
    store: ObjectStore, manifest: Manifest, take: Callable[[LedgerEntry], object]
) -> None:
    """Give the entries along the lineage to `take`, which runs in a thread, in order of step. Only the
    entries of one chunk are in memory.
    """
    listed = {c.digest: c for c in manifest.chunks}
    parts = [
        (listed[digest], tuple(segments))
        for digest, segments in itertools.groupby(manifest.ledger, lambda s: s.chunk)
    ]
    for at in range(0, len(parts), CONCURRENCY):
        some = parts[at : at + CONCURRENCY]
        bodies = await move_all(
            [partial(fetch_verified, store, chunk) for chunk, _ in some], CONCURRENCY
        )
        for (chunk, segments), body in zip(some, bodies, strict=True):
            try:
                await asyncio.to_thread(_take_all, body, segments, take)
            except codec.DecodeError as error:
                raise Broken(f"{chunk.key}: {error}") from None


def _take_all(
    body: bytes, segments: Sequence[LedgerSegment], take: Callable[[LedgerEntry], object]
) -> None:
    lines = ledger.decode_lines(body)
    for entry in ledgers.choose_entries(segments, {segments[0].chunk: lines}):
        take(entry)


async def verify_run(store: ObjectStore, *, state: bool = True, entries: bool = False) -> Verified:
    """Read the log, the newest checkpoint of the lineage and its ledger. If a job that runs retires
    that checkpoint meanwhile, read the next one.

    Args:
        state: also read the checkpoint's tensor chunks and check their digests.
        entries: also return the ledger, which of a long run does not fit into memory.

    Raises:
        StoreError: the store failed to answer.
    """
    for _ in range(TRIES):
        found = await _verify_newest(store, state=state, entries=entries)
        if found is not None:
            return found
    text = f"the job retired {TRIES} checkpoints while they were read: raise checkpoint.keep"
    return Verified(run=store.uri, problems=(f"{store.uri}: {text}",))


async def _verify_newest(store: ObjectStore, *, state: bool, entries: bool) -> Verified | None:
    """None: the checkpoint was retired while it was read."""
    log = RunLog(store)
    try:
        await log.refresh()
        await log.check_whole()
    except LogDamaged as error:
        return Verified(run=store.uri, problems=(str(error),))
    commit = log.index.newest_resumable
    if commit is None:
        text = (
            "there is no run; give the address STORE/NAME of a run that a job has begun"
            if not log.entries
            else "the run has no checkpoint yet"
        )
        return Verified(run=store.uri, problems=(f"{store.uri}: {text}",))
    try:
        manifest = await fetch_manifest(store, commit)
        judged = _Judged(feed.decode_records(manifest.state), keep=entries)
        await _walk(store, manifest, judged.add)
        if repeats := judged.feeds.find_repeats():
            await _walk(store, manifest, repeats.add)
        if state:
            await _read_state(store, manifest)
    except codec.DecodeError as error:
        return Verified(run=store.uri, problems=(f"{commit.manifest}: {error}",), commit=commit)
    except Broken as error:
        await log.refresh()
        if log.index.is_retired(commit.manifest):
            return None
        return Verified(run=store.uri, problems=(str(error),), commit=commit)
    return _judge(store.uri, log, commit, manifest, judged)


async def _read_state(store: ObjectStore, manifest: Manifest) -> None:
    named = {s.chunk for s in manifest.ledger}
    chunks = [c for c in manifest.chunks if c.digest not in named]
    await move_all([partial(StoreTier(store).check, chunk) for chunk in chunks], CONCURRENCY)


class _Judged:
    """What the entries of the ledger show, one after the other."""

    def __init__(self, records: Mapping[str, feed.FeedRecord] | None, *, keep: bool) -> None:
        self.records, self.feeds, self.steps = records, feed_proof.Feeds(records), proof.Steps()
        self.kept: list[LedgerEntry] = []
        self._keep = keep

    def add(self, entry: LedgerEntry) -> None:
        self.steps.add(entry)
        self.feeds.add(entry)
        if self._keep:
            self.kept.append(entry)


def _judge(uri: str, log: RunLog, commit: Commit, manifest: Manifest, judged: _Judged) -> Verified:
    problems = [*judged.steps.problems(manifest.step), *judged.feeds.problems()]
    gap = ledgers.find_gap(manifest.ledger, manifest.step)
    if gap:
        problems.insert(0, gap)
    done = log.done
    if done and done.step != commit.step:
        problems.append(
            f"the run ended at step {done.step}, its newest checkpoint is step {commit.step}"
        )
    return Verified(
        run=uri,
        problems=tuple(problems),
        notes=tuple(feed_proof.list_feed_notes(judged.records)),
        steps=manifest.step,
        epochs=proof.build_epochs(manifest, judged.steps.samples, log.claims),
        entries=tuple(judged.kept),
        commit=commit,
        commits=len(list(log.index.resumable())),
        bytes=manifest.bytes(),
        done=done is not None,
    )


def build_table(verified: Verified) -> str:
    """For people: a few lines, the verdict last."""
    lines = [f"run     {verified.run}"]
    if verified.commit:
        kept = f"{verified.commits} checkpoint{'s' * (verified.commits != 1)} kept"
        end = "done" if verified.done else "not finished"
        lines.append(
            f"newest  epoch {verified.commit.epoch}, step {verified.steps} ({end}), {kept}"
        )
    if verified.epochs:
        lines += ["", f"{'epoch':>5}  {'steps':>15}  {'samples':>9}  began by"]
        lines += [
            f"{s.epoch:>5}  {f'{s.first} to {s.last}':>15}  {s.samples:>9}  {s.cause or '-'}"
            for s in verified.epochs
        ]
        lines.append("")
    lines += [f"NOTE    {note}" for note in verified.notes]
    lines += [f"PROBLEM {problem}" for problem in verified.problems]
    if verified.ok:
        total = sum(s.samples for s in verified.epochs)
        lines.append(
            f"ok      steps 1 to {verified.steps} once each, {total} samples,"
            " none lost or repeated, every micro-batch by exactly one rank"
        )
    return "\n".join(lines)


def exit_code(verified: Verified) -> int:
    return 0 if verified.ok else 1
