"""Compares the newest checkpoints of two runs, tensor by tensor and byte by byte."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from everstep_agent.checkpoint import manifests, restore
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage.store import ObjectStore
from everstep_contract.log import Commit
from everstep_contract.manifest import ITEM_BYTES, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    dtype: str
    shape: tuple[int, ...]
    bytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    tensors: Mapping[str, Value]
    state: Any
    """The state other than tensors: the optimizer's settings, the schedule, the feeds."""


async def load_newest(store: ObjectStore) -> Checkpoint:
    """Load the run's last committed checkpoint. Raises AssertionError if there is none."""
    log = RunLog(store)
    commits = [e for e in await log.refresh() if isinstance(e, Commit)]
    assert commits, "the run has no checkpoint"
    manifest = await manifests.fetch_manifest(store, commits[-1])
    spans = restore.list_spans(manifest)
    needed = [c for c in manifest.chunks if c.digest in spans]
    chunks = {c.digest: await restore.fetch_verified(store, c) for c in needed}
    tensors = {t.name: build_value(t, chunks) for t in manifest.tensors}
    return Checkpoint(step=manifest.step, tensors=tensors, state=manifest.state)


def build_value(tensor: Tensor, chunks: Mapping[str, bytes]) -> Value:
    """Assemble the tensor from its pieces. Raises AssertionError if they do not cover it."""
    item = ITEM_BYTES[tensor.dtype]
    whole = numpy.zeros((*tensor.shape, item), dtype=numpy.uint8)
    filled = numpy.zeros(tensor.shape, dtype=bool)
    for piece in tensor.pieces:
        count = int(numpy.prod(piece.lengths, dtype=numpy.int64)) * item
        raw = numpy.frombuffer(chunks[piece.chunk], dtype=numpy.uint8, count=count, offset=piece.at)
        box = tuple(
            slice(first, first + length)
            for first, length in zip(piece.offsets, piece.lengths, strict=True)
        )
        whole[box] = raw.reshape((*piece.lengths, item))
        filled[box] = True
    assert filled.all(), f"{tensor.name}: its pieces do not cover the whole tensor"
    return Value(dtype=tensor.dtype, shape=tensor.shape, bytes=whole.tobytes())


def list_differences(ours: Checkpoint, theirs: Checkpoint) -> list[str]:
    """One line for each difference; empty if the checkpoints are equal to the last byte."""
    found = []
    if ours.step != theirs.step:
        found.append(f"step {ours.step} instead of {theirs.step}")
    for name in sorted({*ours.tensors, *theirs.tensors}):
        one, other = ours.tensors.get(name), theirs.tensors.get(name)
        if one is None or other is None:
            found.append(f"{name}: only in one of the two checkpoints")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name}: {one.dtype} {one.shape} instead of {other.dtype} {other.shape}")
        elif one.bytes != other.bytes:
            found.append(f"{name}: other values")
    if ours.state != theirs.state:
        found.append("the state that is not a tensor differs")
    return found
