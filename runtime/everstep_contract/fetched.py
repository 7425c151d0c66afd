"""What `everstep fetch --json` prints: where a checkpoint's files are now, for `everstep.load`."""

from dataclasses import dataclass

WAITS = "everstep: waiting for the store: "
"""How each line begins that the command writes to stderr while the store does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    run: str
    """The run's address."""
    epoch: int
    step: int
    manifest: str
    """Path of the manifest."""
    places: str
    """Path of a `Places` document: where the checkpoint's chunks are."""
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that cannot be read, the newest first."""
