"""Reads a checkpoint that the agent has fetched and verified: a manifest, a folder of chunks, and chunks that still
lie where they were staged.
"""

import json
import math
import mmap
import os
from pathlib import Path

import torch

from everstep.errors import StateError
from everstep_contract import codec, manifest


class Checkpoint:
    """Tensors by name, mapped from the chunks. The pages are private: a caller may change them.

    Raises:
        StateError: the manifest cannot be read.
    """

    def __init__(self, manifest_path: str, chunks: str, held: str | None = None) -> None:
        try:
            self.manifest = manifest.decode(Path(manifest_path).read_bytes())
            self._held: dict[str, tuple[str, int]] = (
                json.loads(Path(held).read_bytes()) if held else {}
            )
        except (OSError, ValueError, codec.DecodeError) as error:
            raise StateError(f"cannot read the checkpoint {manifest_path}: {error}") from error
        self._chunks = Path(chunks)
        self._tensors = {t.name: t for t in self.manifest.tensors}
        self._maps: dict[Path, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """Shape and dtype as stored, on the CPU. Raises `StateError` if there is none."""
        stored = self._tensors.get(name)
        if stored is None:
            raise StateError(f"the checkpoint at step {self.manifest.step} has no tensor {name!r}")
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if math.prod(stored.shape) == 0:
            return torch.empty(stored.shape, dtype=dtype)
        if len(stored.pieces) == 1:
            return self._piece(stored.pieces[0], dtype)
        whole = torch.empty(stored.shape, dtype=dtype)
        for piece in stored.pieces:
            part = self._piece(piece, dtype)
            if part.numel():
                where = tuple(
                    slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
                )
                whole[where] = part
        return whole

    def _piece(self, piece: manifest.Piece, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(piece.lengths) * dtype.itemsize
        raw = self._chunk(piece.chunk)[piece.at : piece.at + size]
        if piece.at % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(piece.lengths)

    def _chunk(self, digest: str) -> torch.Tensor:
        path, start = self._held.get(digest, (self._chunks / digest, 0))
        return self._map(Path(path))[start:]

    def _map(self, path: Path) -> torch.Tensor:
        """The bytes of a whole file."""
        if path not in self._maps:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                page = mmap.mmap(
                    descriptor,
                    0,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            finally:
                os.close(descriptor)
            self._maps[path] = torch.frombuffer(page, dtype=torch.uint8)
        return self._maps[path]
