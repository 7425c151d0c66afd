"""Saves that were staged, and whose upload was not finished when their agent was killed.

A file beside the staged one says what was to be uploaded, so that the agent's successor can do it. Whether such a save
is committed is decided by the coordinator (`coordinator/unfinished.py`).
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from everstep_agent.checkpoint.files import replace_file
from everstep_contract import codec, wire
from everstep_contract.ledger import LedgerEntry

NAME = ".unsent"
"""What its name has more than that of the staged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    staged: wire.Staged
    rank: int
    entries: tuple[LedgerEntry, ...] = ()
    """For the lead: the ledger that goes with it."""


def unsent_of(file: Path) -> Path:
    return file.with_name(file.name + NAME)


def write_unsent(unsent: Unsent) -> None:
    """Raises OSError."""
    replace_file(unsent_of(Path(unsent.staged.path)), codec.dumps(unsent))


def read_unsent(staging: Path) -> tuple[Unsent, ...]:
    """What a predecessor left in this folder."""
    found = []
    for path in sorted(staging.glob(f"*{NAME}")):
        file = path.with_name(path.name.removesuffix(NAME))
        with contextlib.suppress(OSError, codec.DecodeError):
            unsent = codec.loads(Unsent, path.read_bytes())
            if file.is_file():
                staged = replace(unsent.staged, path=str(file))
                found.append(replace(unsent, staged=staged))
    return tuple(found)
