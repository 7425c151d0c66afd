"""What a storm left behind, read without Everstep's code: the workers' records, the journal, the store's objects."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "int64": 8,
    "int32": 4,
    "uint32": 4,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One worker process in one epoch."""

    slot: int
    attempt: int
    epoch: int
    rank: int
    world: int
    start: int
    """The step whose state it began with."""
    digest: str
    """Digest of that state."""
    born: float
    used: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(step, the samples that it contributed to the step), in the order of writing."""
    applied: tuple[tuple[int, str, float], ...] = ()
    """(step, digest of the state after it, time), in the order of writing."""

    @property
    def name(self) -> str:
        return f"slot {self.slot} attempt {self.attempt} in epoch {self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    kind: str
    at: float
    hurts: bool
    slot: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    lives: tuple[Life, ...]
    entries: tuple[Mapping[str, Any], ...]
    """The run log's entries, in the order of their places."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """The store's objects by key, relative to the run."""
    strikes: tuple[Strike, ...] = ()


def read(folder: Path) -> Evidence:
    root = folder / "objects"
    objects = {
        p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()
    }
    return Evidence(
        lives=tuple(read_life(p) for p in sorted((folder / "records").iterdir())),
        entries=read_log(objects),
        objects=objects,
        strikes=read_strikes((folder / "journal.jsonl").read_text().splitlines()),
    )


def read_log(objects: Mapping[str, bytes]) -> tuple[Mapping[str, Any], ...]:
    """The entries of the run log. Raises AssertionError if a place is missing."""
    keys = sorted(k for k in objects if k.startswith("log/"))
    assert keys == [f"log/{n:012d}.json" for n in range(len(keys))], "the log has a hole"
    return tuple(json.loads(objects[k]) for k in keys)


def read_life(path: Path) -> Life:
    """A last line that was cut short when its process ended is left out."""
    raw = path.read_bytes()
    lines = [json.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
    head, *rest = lines
    return Life(
        **{n: head[n] for n in ("slot", "attempt", "epoch", "rank", "world", "start", "digest")},
        born=head["at"],
        used=tuple((x["used"], tuple(x["samples"])) for x in rest if "used" in x),
        applied=tuple((x["applied"], x["digest"], x["at"]) for x in rest if "applied" in x),
    )


def read_strikes(lines: Sequence[str]) -> tuple[Strike, ...]:
    found = [json.loads(line) for line in lines]
    return tuple(
        Strike(
            kind=e["kind"], at=e["at"], hurts=e["hurts"], slot=e.get("slot"), attempt=e.get("attempt")
        )
        for e in found
        if e["event"] == "strike"
    )  # fmt: skip


def read_tensors(objects: Mapping[str, bytes], manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """Assemble the tensors from their pieces, row-major. Raises KeyError or AssertionError."""
    keys = {c["digest"]: c["key"] for c in manifest["chunks"]}
    chunks = {digest: objects[key] for digest, key in keys.items()}
    return {t["name"]: _read_tensor(t, chunks) for t in manifest["tensors"]}


def _read_tensor(tensor: Mapping[str, Any], chunks: Mapping[str, bytes]) -> bytes:
    """Everstep cuts tensors along the first dimension only, so a piece is a run of complete rows."""
    shape, size = tensor["shape"], ITEM_BYTES[tensor["dtype"]]
    row = math.prod(shape[1:]) * size
    whole = bytearray()
    for piece in sorted(tensor["pieces"], key=lambda p: p["offsets"]):
        assert piece["lengths"][1:] == shape[1:], "a piece does not have complete rows"
        first, count = (piece["offsets"][0], piece["lengths"][0]) if shape else (0, 1)
        assert len(whole) == first * row, "pieces overlap or leave a gap"
        raw = chunks[piece["chunk"]][piece["at"] : piece["at"] + count * row]
        assert len(raw) == count * row, "a chunk ends before its piece does"
        whole += raw
    assert len(whole) == math.prod(shape) * size, "a piece is missing"
    return bytes(whole)
