"""The layout of a rank's state: name, dtype and shape of each tensor.

A checkpoint holds one copy of a state that every rank has, so the layouts of all ranks must
agree. Each save carries the digest of its rank's layout, and the packed layout itself when it
is new.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping

from everstep_contract import codec

LIMIT_BYTES = 64 * 1024 * 1024
OWN = "random/"
"""Prefix for the names of tensors that each rank has for itself: the states of its random
generators. They are not compared.
"""
LOCAL = "$local/"
"""The same for the state of `job.track_local`; the rank follows the prefix. No tracked name begins
with it.
"""
SHOWN = 3
"""How many tensors a message names."""


def describe(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The layout of these tensors, each given as (name, dtype, shape), as JSON."""
    rows = [[name, f"{dtype} {tuple(shape)}"] for name, dtype, shape in sorted(tensors)]
    return json.dumps(rows, separators=(",", ":")).encode()


def digest(described: bytes) -> str:
    return hashlib.sha256(described).hexdigest()


def pack(described: bytes) -> str:
    return base64.b64encode(zlib.compress(described, 1)).decode()


def unpack(packed: str) -> dict[str, str]:
    """Tensor name → dtype and shape. Raises `codec.DecodeError` for input that `pack` did not
    produce.
    """
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(packed), LIMIT_BYTES)
        return {str(name): str(what) for name, what in json.loads(raw)}
    except (ValueError, TypeError, zlib.error) as error:
        raise codec.DecodeError(f"layout: {error}") from None


def explain_difference(packed: Mapping[int, str]) -> str:
    """Which tensors differ, and which ranks have which form. `packed`: rank → packed layout. Empty:
    no difference is known.
    """
    layouts = {rank: unpack(text) for rank, text in packed.items()}
    names = sorted({name for layout in layouts.values() for name in layout})
    lines = [line for name in names if (line := _explain_tensor(name, layouts))]
    more = len(lines) - SHOWN
    return "; ".join([*lines[:SHOWN], *([f"and {more} more tensors"] if more > 0 else [])])


def _explain_tensor(name: str, layouts: Mapping[int, Mapping[str, str]]) -> str:
    forms: dict[str, list[int]] = {}
    for rank in sorted(layouts):
        forms.setdefault(layouts[rank].get(name, "missing"), []).append(rank)
    if len(forms) == 1:
        return ""
    return f"tensor {name} is " + ", ".join(
        f"{form} on {name_ranks(ranks)}" for form, ranks in forms.items()
    )


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`."""
    shown = ", ".join(str(r) for r in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
