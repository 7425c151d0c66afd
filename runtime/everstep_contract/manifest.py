"""Manifest v1: the JSON document that lists a checkpoint. Created once, never rewritten; no pickle anywhere.

A checkpoint is logical tensors (name, dtype, global shape), each stored as pieces: a box of the tensor (offsets and
lengths, one number per dimension) at a byte position of a chunk. Chunks are addressed by their SHA-256. What is not a
tensor is the `state` tree (see `everstep.state`), in which a tensor stands as `{"$tensor": name}`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import codec

VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""What this reader understands; a manifest that names another feature is refused."""
LIMIT_BYTES = 256 * 1024 * 1024
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The box `offsets .. offsets + lengths` of a tensor, contiguous and row-major at byte `at` of `chunk`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    digest: str
    """Hex SHA-256 of the content."""
    key: str
    """Relative to the run; carries the claim under which it was written."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSegment:
    """Steps `first .. last` (inclusive) of one epoch, as JSON lines in `chunk`."""

    epoch: int
    first: int
    last: int
    chunk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    version: int = VERSION
    features: tuple[str, ...] = ()
    run: str
    epoch: int
    step: int
    writer: str
    """Token of the claim under which it was written."""
    world: int
    parent: str | None = None
    """Key of the manifest of the commit before this one on the same lineage."""
    tensors: tuple[Tensor, ...] = ()
    state: Any = None
    chunks: tuple[Chunk, ...] = ()
    ledger: tuple[LedgerSegment, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """The time ledger so far, summed over ranks along the lineage."""

    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)


def decode(raw: bytes) -> Manifest:
    """Raises `codec.DecodeError` if the document is not a manifest that this reader may use."""
    if len(raw) > LIMIT_BYTES:
        raise codec.DecodeError(f"Manifest: {len(raw)} bytes, more than {LIMIT_BYTES}")
    manifest = codec.loads(Manifest, raw)
    for problem in problems(manifest):
        raise codec.DecodeError(f"Manifest: {problem}")
    return manifest


def problems(manifest: Manifest) -> list[str]:
    """What makes a manifest unusable, in words; an empty list means it may be loaded."""
    found: list[str] = []
    if manifest.version != VERSION:
        return [f"version {manifest.version}; this reader knows {VERSION}"]
    unknown = sorted(set(manifest.features) - FEATURES)
    if unknown:
        return [f"needs features that this reader lacks: {', '.join(unknown)}"]
    sizes = {c.digest: c.bytes for c in manifest.chunks}
    found += [
        f"chunk {chunk.digest[:12]} has the key {chunk.key!r}"
        for chunk in manifest.chunks
        if ".." in chunk.key.split("/") or chunk.key.startswith("/") or chunk.bytes < 0
    ]
    for tensor in manifest.tensors:
        found += _tensor_problems(tensor, sizes)
    found += [
        f"ledger chunk {s.chunk[:12]} is not listed"
        for s in manifest.ledger
        if s.chunk not in sizes
    ]
    return found


def _tensor_problems(tensor: Tensor, sizes: dict[str, int]) -> list[str]:
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        return [f"tensor {tensor.name}: unknown dtype {tensor.dtype!r}"]
    if any(d < 0 for d in tensor.shape):
        return [f"tensor {tensor.name}: negative shape {tensor.shape}"]
    covered = 0
    for piece in tensor.pieces:
        size = math.prod(piece.lengths) * item
        covered += size
        inside = len(piece.offsets) == len(piece.lengths) == len(tensor.shape) and all(
            o >= 0 and n >= 0 and o + n <= d
            for o, n, d in zip(piece.offsets, piece.lengths, tensor.shape, strict=True)
        )
        if not inside:
            return [f"tensor {tensor.name}: a piece lies outside the shape {tensor.shape}"]
        if piece.at < 0 or piece.at + size > sizes.get(piece.chunk, -1):
            return [f"tensor {tensor.name}: a piece lies outside its chunk {piece.chunk[:12]}"]
    if covered != math.prod(tensor.shape) * item:
        return [
            f"tensor {tensor.name}: pieces cover {covered} bytes of {math.prod(tensor.shape) * item}"
        ]
    return []
