"""When a save may be committed, and its manifest. Pure.

The invariant: a commit of (epoch, step) names state that every member of that epoch has reached. It
consists of pieces that all carry this epoch and step, that cover each tensor exactly, and whose
chunks are not retired. No rank reports other values, or a parameter that is NaN or infinite. The
commit extends the newest commit of the lineage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_agent.checkpoint.ledger import join_segments
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.replicas import Difference, find_difference, name_tensors
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.rules import Verdict
from everstep_contract import layout
from everstep_contract import manifest as manifests
from everstep_contract.layout import name_ranks
from everstep_contract.log import Commit
from everstep_contract.manifest import AgentSeconds, Chunk, LedgerSegment, Manifest, Tensor
from everstep_contract.units import ONE_RANK, Mesh


class BadSave(ValueError):
    """The parts do not form a complete state: the save is dropped and must be taken again."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """Parameters or optimizer state hold NaN or infinite values, the same on all ranks. The save is
    dropped.
    """

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Differ:
    """The ranks' states do not have the same tensors: no checkpoint of this job can be made."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagree:
    """The ranks hold the same tensors with different values. Nothing of this epoch may be committed
    any more.
    """

    epoch: int
    difference: Difference
    message: str


def decide_commit(
    parts: Iterable[Part],
    *,
    epoch: int,
    step: int,
    world: int,
    applied: Mapping[int, int],
    mesh: Mesh = ONE_RANK,
) -> Wait | Ready | Drop | NotFinite | Differ | Disagree:
    """Whether the save of (epoch, step) is complete.

    Args:
        world: ranks of that epoch.
        applied: last applied step of each member that still runs, without those that are parked or
            dead.
        mesh: how its ranks form units.
    """
    ours = [p for p in parts if (p.epoch, p.step) == (epoch, step)]
    whole = find_whole(ours, mesh)
    chosen = whole or _by_rank(p for p in ours if not p.whole)
    missing = [] if whole else sorted(set(range(world)) - {p.rank for p in chosen})
    if missing:
        text = f"step {step}: no part yet from {name_ranks(missing)}"
        return Wait(reason="PartsMissing", message=text)
    if differ := _explain_difference(step, chosen):
        return Differ(message=differ)
    behind = sorted(rank for rank, at in applied.items() if at < step)
    if behind:
        text = f"step {step}: {name_ranks(behind)} has not reached it yet"
        return Wait(reason="NotApplied", message=text)
    if not any(p.lead for p in chosen):
        return Drop(reason="NoLead", message="no part carries the state tree")
    if (odd := find_difference(chosen)) is not None:
        return Disagree(epoch=epoch, difference=odd, message=f"step {step}: {odd.describe()}")
    # After the comparison: if only one rank has such values, that rank differs, and all go back.
    if bad := list(dict.fromkeys(n for p in chosen for n in p.not_finite)):
        return NotFinite(message=f"NaN or infinite values in {name_tensors(bad)}")
    return Ready(parts=tuple(chosen))


def find_whole(parts: Iterable[Part], mesh: Mesh) -> list[Part]:
    """The parts of the first unit of which every rank has saved all that it holds. Together they
    are the full state, without the parts of other units. Empty: there is no such unit.

    Args:
        parts: of one epoch and step.
    """
    units: dict[int, list[Part]] = {}
    for part in _by_rank(p for p in parts if p.whole):
        units.setdefault(mesh.unit_of(part.rank), []).append(part)
    return next((found for _, found in sorted(units.items()) if len(found) == mesh.unit), [])


def use_kept(parts: Iterable[Part], log: LogIndex) -> list[Part]:
    """The parts, each chunk under a key that the log has not retired, if one of them has such a key.
    Two pods may have stored the same chunk under two keys, of which only one stays in use.
    """
    known = list(parts)
    kept = {c.digest: c for p in known for c in p.chunks if not log.is_retired(c.key)}
    return [replace(p, chunks=tuple(kept.get(c.digest, c) for c in p.chunks)) for p in known]


def list_given_up(parts: Iterable[Part], log: LogIndex) -> list[str]:
    """Keys of chunks that the parts use although the log has retired them, so they may be deleted
    at any time.
    """
    return sorted({c.key for p in parts for c in p.chunks if log.is_retired(c.key)})


def _by_rank(parts: Iterable[Part]) -> list[Part]:
    """One part per rank: a later one replaces an earlier one (a repeated request)."""
    return [part for _, part in sorted({p.rank: p for p in parts}.items())]


def _explain_difference(step: int, parts: Sequence[Part]) -> str:
    """How the tensors differ between ranks, for a message; empty: they do not.

    A checkpoint holds one copy of the state. Each rank stores a share that it computes from its own
    list of tensors. So all ranks must have the same tensors, even those that only one rank stores.
    """
    layouts = {p.rank: p.layout for p in parts if p.layout}
    if len(set(layouts.values())) < 2:
        return ""
    known = {p.rank: p.packed for p in parts if p.packed}
    what = layout.explain_difference(known) or "their tensors differ"
    return (
        f"no checkpoint of step {step} can be made, because the tracked state differs "
        f"between ranks: {what}. Track only what is the same on every rank, and state that each rank "
        "has for itself with job.track_local"
    )


def decide_append(commit: Commit, log: LogIndex) -> Verdict:
    """Whether a commit may still be appended to this log, that is, whether its claim is the newest
    and it extends the lineage.
    """
    verdict = runlog_rules.may_append(commit, log.newest_claim)
    if not verdict.ok:
        return verdict
    if not log.is_on_lineage(commit.epoch, commit.step):
        text = f"epoch {commit.epoch} step {commit.step} is not on the newest claim's lineage"
        return Verdict(ok=False, reason="OffLineage", message=text)
    last = log.newest_resumable
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
    agents: Sequence[AgentSeconds] = (),
) -> Manifest:
    """Raises `BadSave`, naming the tensor, if the parts contradict each other or leave a gap."""
    lead = next(p for p in parts if p.lead)
    inherited = parent.ledger if parent else ()
    segments = join_segments(inherited, lead.ledger)
    chunks = _chunks(parts, segments, parent)
    built = Manifest(
        features=(manifests.BLAKE3,)
        if any(c.digest.startswith(manifests.BLAKE3_PREFIX) for c in chunks)
        else (),
        run=run,
        epoch=lead.epoch,
        step=lead.step,
        writer=writer,
        world=world,
        parent=parent_key,
        tensors=build_tensors(parts),
        state=lead.state,
        chunks=chunks,
        ledger=segments,
        seconds=dict(seconds or {}),
        agents=tuple(agents),
    )
    for problem in manifests.problems(built):
        raise BadSave(problem)
    return built


def _chunks(
    parts: Sequence[Part], segments: Sequence[LedgerSegment], parent: Manifest | None
) -> tuple[Chunk, ...]:
    found = {c.digest: c for p in parts for c in p.chunks}
    named = {s.chunk for s in segments}
    # The parent's key wins: a manifest must not list one digest under two keys.
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
