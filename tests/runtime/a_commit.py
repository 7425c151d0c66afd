"""Does what an agent does with staged parts, but without a store: writes chunks under their digests
and a manifest.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import xxhash

from everstep_contract import codec, manifest, wire
from everstep_contract.places import Place, Places, name_span


def commit(folder: Path, staged: list[wire.Staged]) -> dict[str, Any]:
    """Return the fields of `wire.Start` for workers that resume from these parts."""
    chunks, pieces, places = [], {}, {}
    for part in staged:
        raw = Path(part.path).read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        (folder / digest).write_bytes(raw)
        chunks.append(manifest.Chunk(digest=digest, key=f"chunks/{digest}", bytes=len(raw)))
        spans = [(t.at, math.prod(t.lengths) * manifest.ITEM_BYTES[t.dtype]) for t in part.tensors]
        places[digest] = Place(
            path=str(folder / digest),
            start=0,
            bytes=len(raw),
            sums={name_span(at, n): xxhash.xxh3_64_intdigest(raw[at : at + n]) for at, n in spans},
        )
        for t in part.tensors:
            piece = manifest.Piece(offsets=t.offsets, lengths=t.lengths, chunk=digest, at=t.at)
            pieces.setdefault((t.name, t.dtype, t.shape), []).append(piece)
    tensors = tuple(
        manifest.Tensor(name=n, dtype=d, shape=s, pieces=tuple(p))
        for (n, d, s), p in pieces.items()
    )
    tree = next((p.state for p in staged if p.lead), None)
    document = manifest.Manifest(
        run="r", epoch=1, step=staged[0].step, writer="w", world=len(staged), tensors=tensors,
        state=json.loads(json.dumps(tree)), chunks=tuple(chunks),
    )  # fmt: skip
    assert manifest.problems(document) == []
    path = folder / "manifest.json"
    path.write_bytes(codec.dumps(document))
    (folder / "places.json").write_bytes(codec.dumps(Places(chunks=places)))
    return {
        "manifest": str(path),
        "places": str(folder / "places.json"),
        "applied": staged[0].step,
    }
