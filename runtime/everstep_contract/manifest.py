"""Manifest v1: the JSON document that lists a checkpoint. Created once, never rewritten; no pickle
anywhere.

A checkpoint consists of logical tensors (name, dtype, global shape), each stored as pieces: a
box of the tensor (offsets and lengths, one number per dimension) at a byte position of a chunk.
Chunks are addressed by their digest. Everything else is in the `state` tree (see
`everstep.state`), in which a tensor is represented by `{"$tensor": name}`.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import codec

VERSION = 1
BLAKE3, BLAKE3_PREFIX = "blake3", "b3-"
"""The feature that a manifest names if any of its digests is BLAKE3, and the prefix of such
digests.
"""
FEATURES: frozenset[str] = frozenset({BLAKE3})
"""Features that this reader supports; a manifest that names another one is refused."""
LIMIT_BYTES = 256 * 1024 * 1024
LIMIT_DEPTH = 100
"""Limit of the `state` tree, which is walked recursively."""
_KEY = re.compile(r"chunks(/(?!\.\.?(/|$))[A-Za-z0-9._=@+-]{1,200})+")
_DIGEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,199}")
"""Files are named by digests, so no other form is accepted."""
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
    """Of the content: `b3-` and BLAKE3 in hex, or SHA-256 in hex."""
    key: str
    """Relative to the run; contains the claim under which it was written."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSegment:
    """Steps `first .. last` (inclusive) of one epoch, as JSON lines in `chunk`."""

    epoch: int
    first: int
    last: int
    chunk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSeconds:
    """The seconds that one start of an agent's container had reported for its ranks."""

    slot: int
    attempt: int
    incarnation: int
    seconds: dict[str, float] = field(default_factory=dict)


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
    agents: tuple[AgentSeconds, ...] = ()
    """The part of `seconds` from agents that may report again: their next report replaces it."""

    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)


def decode(raw: bytes) -> Manifest:
    """Raises `codec.DecodeError` if the document is not a manifest that this reader may use."""
    if len(raw) > LIMIT_BYTES:
        raise codec.DecodeError(f"Manifest: {len(raw)} bytes, more than {LIMIT_BYTES}")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise codec.DecodeError(f"Manifest: not JSON: {error}") from None
    version = document.get("version", VERSION) if isinstance(document, dict) else VERSION
    if version != VERSION:  # checked first: another version may have other types of fields
        raise codec.DecodeError(f"Manifest: version {version!r:.40}; this reader knows {VERSION}")
    manifest = codec.decode(Manifest, document)
    for problem in problems(manifest):
        raise codec.DecodeError(f"Manifest: {problem}")
    return manifest


def problems(manifest: Manifest) -> list[str]:
    """What makes a manifest unusable, as text; empty: it may be loaded."""
    found: list[str] = []
    if _depth(manifest.state) > LIMIT_DEPTH:
        return [f"the state is nested deeper than {LIMIT_DEPTH} levels"]
    if manifest.version != VERSION:
        return [f"version {manifest.version}; this reader knows {VERSION}"]
    unknown = sorted(set(manifest.features) - FEATURES)
    if unknown:
        return [f"needs features that this reader lacks: {', '.join(unknown)}"]
    sizes = {c.digest: c.bytes for c in manifest.chunks}
    found += [
        f"a chunk has the digest {chunk.digest!r:.80}"
        for chunk in manifest.chunks
        if not _DIGEST.fullmatch(chunk.digest)
    ]
    found += [
        f"chunk {chunk.digest[:12]} has the key {chunk.key!r}"
        for chunk in manifest.chunks
        if not _KEY.fullmatch(chunk.key)
    ]
    found += [
        f"chunk {chunk.digest[:12]} has {chunk.bytes} bytes"
        for chunk in manifest.chunks
        if chunk.bytes < 0
    ]
    names = [t.name for t in manifest.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        found.append(f"tensor {twice} is listed twice")
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
            return [f"tensor {tensor.name}: a piece is outside the shape {tensor.shape}"]
        if piece.at < 0 or piece.at + size > sizes.get(piece.chunk, -1):
            return [f"tensor {tensor.name}: a piece is outside its chunk {piece.chunk[:12]}"]
    if covered != math.prod(tensor.shape) * item:
        return [
            f"tensor {tensor.name}: pieces cover {covered} bytes of {math.prod(tensor.shape) * item}"
        ]
    twice = _find_overlap(tensor)
    return [f"tensor {tensor.name}: two pieces hold {twice}"] if twice is not None else []


def _find_overlap(tensor: Tensor) -> tuple[int, ...] | None:
    """Where two pieces overlap; None: nowhere. If two overlap, as many bytes are in no piece, and
    would be read uninitialized.
    """
    # Along the dimension that divides the tensor most, only neighbours have to be compared.
    starts = [len({piece.offsets[d] for piece in tensor.pieces}) for d in range(len(tensor.shape))]
    dim = starts.index(max(starts)) if starts else None
    pieces = sorted(tensor.pieces, key=lambda p: 0 if dim is None else p.offsets[dim])
    for i, piece in enumerate(pieces):
        for j in range(i + 1, len(pieces)):
            later = pieces[j]
            if dim is not None and later.offsets[dim] >= piece.offsets[dim] + piece.lengths[dim]:
                break
            if _overlap(piece, later):
                return later.offsets
    return None


def _overlap(a: Piece, b: Piece) -> bool:
    sides = zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    return all(at < bt + bn and bt < at + an for at, an, bt, bn in sides)


def _depth(tree: Any) -> int:
    """Depth of nested lists and objects, counted to at most one beyond the limit."""
    level, depth = [tree], 0
    while level and depth <= LIMIT_DEPTH:
        level = [
            value
            for node in level
            if isinstance(node, (dict, list, tuple))
            for value in (node.values() if isinstance(node, dict) else node)
        ]
        depth += bool(level)
    return depth
