"""When a save may be committed, and the manifest that says so. Pure.

The invariant: a commit of (epoch, step) names state that every member of that epoch has reached,
from pieces that all carry this epoch and step and that cover each tensor exactly, in chunks that
nobody has given up; and it extends the newest commit of the lineage.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_agent import runlog_rules
from everstep_agent.checkpoint.ledger import join_segments
from everstep_agent.checkpoint.parts import Part
from everstep_agent.runlog_rules import Verdict
from everstep_contract import manifest as manifests
from everstep_contract.log import Commit, Entry
from everstep_contract.manifest import Chunk, LedgerSegment, Manifest, Tensor


class BadSave(ValueError):
    """The parts do not make a whole: the save is dropped and must be taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    reason: str
    message: str


def decide_commit(
    parts: Iterable[Part],
    *,
    epoch: int,
    step: int,
    world: int,
    applied: Mapping[int, int],
    retired: Collection[str] = (),
) -> Wait | Ready | Drop:
    """Whether the save of (epoch, step) is complete.

    Args:
        world: ranks of that epoch.
        applied: last applied step of each member that still runs; whoever is parked or dead is not
            in it. retired: chunk keys that the log has given up.
    """
    ours = [p for p in parts if (p.epoch, p.step) == (epoch, step)]
    whole = next((p for p in ours if p.whole), None)
    chosen = [whole] if whole else _by_rank(ours)
    missing = [] if whole else sorted(set(range(world)) - {p.rank for p in chosen})
    if missing:
        text = f"step {step}: no part yet from {_ranks(missing)}"
        return Wait(reason="PartsMissing", message=text)
    behind = sorted(rank for rank, at in applied.items() if at < step)
    if behind:
        text = f"step {step}: {_ranks(behind)} not there yet"
        return Wait(reason="NotApplied", message=text)
    if not any(p.lead for p in chosen):
        return Drop(reason="NoLead", message=f"step {step}: no part carries the state tree")
    given_up = list_given_up(chosen, retired)
    if given_up:
        text = f"step {step}: {len(given_up)} of its chunks were retired meanwhile"
        return Drop(reason="ChunksRetired", message=text)
    return Ready(parts=tuple(chosen))


def list_given_up(parts: Iterable[Part], retired: Collection[str]) -> list[str]:
    """Keys of chunks that the parts refer to and the log has given up: they may be deleted any
    time.
    """
    return sorted({c.key for p in parts for c in p.chunks} & set(retired))


def _by_rank(parts: Iterable[Part]) -> list[Part]:
    """One part a rank: a later one replaces an earlier one (an answer that came twice)."""
    return [part for _, part in sorted({p.rank: p for p in parts}.items())]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def decide_append(commit: Commit, entries: Sequence[Entry]) -> Verdict:
    """Whether a commit may still be appended after `entries`: own claim newest, on the lineage,
    extending it.
    """
    newest = runlog_rules.newest_claim(entries)
    verdict = runlog_rules.may_append(commit, newest)
    if not verdict.ok:
        return verdict
    if not runlog_rules.on_chain(commit.epoch, commit.step, runlog_rules.lineage_of(newest)):
        text = f"epoch {commit.epoch} step {commit.step} is not on the newest claim's lineage"
        return Verdict(ok=False, reason="OffLineage", message=text)
    last = runlog_rules.newest_resumable(entries)
    if last and last.step >= commit.step:
        text = f"step {last.step} is committed already"
        return Verdict(ok=False, reason="NotNewer", message=text)
    return Verdict(ok=True, reason="Extends", message=f"step {commit.step} extends the lineage")


def build_manifest(
    parts: Sequence[Part],
    *,
    run: str,
    writer: str,
    world: int,
    parent: Manifest | None = None,
    parent_key: str | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Manifest:
    """Raises `BadSave` if the parts contradict each other or leave a hole; it names the tensor."""
    lead = next(p for p in parts if p.lead)
    inherited = parent.ledger if parent else ()
    segments = join_segments(inherited, lead.ledger)
    built = Manifest(
        run=run,
        epoch=lead.epoch,
        step=lead.step,
        writer=writer,
        world=world,
        parent=parent_key,
        tensors=build_tensors(parts),
        state=lead.state,
        chunks=_chunks(parts, segments, parent),
        ledger=segments,
        seconds=dict(seconds or {}),
    )
    for problem in manifests.problems(built):
        raise BadSave(problem)
    return built


def _chunks(
    parts: Sequence[Part], segments: Sequence[LedgerSegment], parent: Manifest | None
) -> tuple[Chunk, ...]:
    found = {c.digest: c for p in parts for c in p.chunks}
    named = {s.chunk for s in segments}
    # The parent's key wins: one digest must not stand under two keys in one manifest.
    found |= {c.digest: c for c in (parent.chunks if parent else ()) if c.digest in named}
    return tuple(found.values())


def build_tensors(parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Each tensor once, with the pieces of all parts in order."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for tensor in part.tensors:
            held = merged.get(tensor.name)
            if held and (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
                raise BadSave(
                    f"tensor {tensor.name}: rank {part.rank} has {tensor.dtype} {tensor.shape},"
                    f" another {held.dtype} {held.shape}"
                )
            pieces = (*held.pieces, *tensor.pieces) if held else tensor.pieces
            merged[tensor.name] = replace(tensor, pieces=pieces)
    return tuple(
        replace(t, pieces=tuple(sorted(t.pieces, key=lambda p: p.offsets)))
        for _, t in sorted(merged.items())
    )
