"""A chunk on its way from the store into a file. It is verified and written as it arrives, so the agent
never holds all of it in memory of its own.
"""

import contextlib
from collections.abc import Callable

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.digest import PieceSums, Spans
from everstep_agent.checkpoint.files import NewFile
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_contract.manifest import Chunk


async def download(
    store: StoreTier, chunk: Chunk, spans: Spans, create: Callable[[], NewFile] | None
) -> dict[str, int]:
    """Verify a chunk of the store, and write it to a new file.

    Args:
        spans: the pieces of tensors in the chunk.
        create: returns the file; called again if the chunk is read again. None: do not write it.

    Returns the checksums of the pieces, as in `Place`.

    Raises:
        Broken: the chunk is gone, or does not match its digest.
        StoreError: the store cannot be read.
        OSError: the chunk could not be written.
    """
    with contextlib.ExitStack() as files:

        def begin() -> Landing:
            files.close()  # of the try before, which may still be writing to it
            new = files.enter_context(contextlib.closing(create())) if create else None
            return Landing(chunk.digest, spans, new)

        landing = await store.stream(chunk, begin, urgent=True)
        landing.publish()
        return landing.sums


class Landing:
    """Takes the parts of a chunk in their order. It may be used as the chunk's hash."""

    def __init__(self, name: str, spans: Spans, new: NewFile | None) -> None:
        self._hash, self._pieces, self._new = digest.begin(name), PieceSums(spans), new
        self._error: OSError | None = None

    @property
    def sums(self) -> dict[str, int]:
        return self._pieces.sums

    def update(self, part: bytes | memoryview) -> None:
        self._hash.update(part)
        self._pieces.update(part)
        if self._new is not None and self._error is None:
            try:
                self._new.file.write(part)
            except OSError as error:
                self._error = error  # of this pod, not of the store

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def publish(self) -> None:
        """Publish the file. Raises OSError if the chunk could not be written."""
        if self._error is not None:
            raise self._error
        if self._new is not None:
            self._new.publish()
