"""Follows a run in its object store, which is authoritative for the run's state."""

import time
from collections.abc import Mapping

from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import opening
from everstep_agent.tools import verify
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Claim, Commit, Done, Entry
from everstep_demo import tensors


class RunWatch:
    """The log of one run; each entry with the time (monotonic clock) at which it was read."""

    def __init__(self, uri: str, run: str, environ: Mapping[str, str]) -> None:
        self._store = opening.open_store(uri, run, environ)
        self._log = RunLog(self._store)
        self._read: list[tuple[float, Entry]] = []

    async def refresh(self) -> list[Entry]:
        """Read new entries; returns those since the last call."""
        new = list(await self._log.refresh())
        now = time.monotonic()
        self._read += [(now, entry) for entry in new]
        return new

    @property
    def epoch(self) -> int:
        """Epoch of the newest claim; 0 before the first."""
        return self.newest_claim.epoch if self.newest_claim else 0

    @property
    def committed(self) -> int:
        """Step of the newest commit; 0 before the first."""
        commits = [e for _, e in self._read if isinstance(e, Commit)]
        return commits[-1].step if commits else 0

    @property
    def incidents(self) -> set[str]:
        """Ids of the incidents that the claims name."""
        return {e.incident for _, e in self._read if isinstance(e, Claim) and e.incident}

    @property
    def done(self) -> bool:
        return any(isinstance(e, Done) for _, e in self._read)

    @property
    def newest_claim(self) -> Claim | None:
        return next((e for _, e in reversed(self._read) if isinstance(e, Claim)), None)

    async def checkpoint(self) -> tensors.Checkpoint:
        """The newest committed checkpoint, with the bytes of all its tensors."""
        return await tensors.load_newest(self._store)

    async def ledger(self) -> list[LedgerEntry]:
        return await verify.load_ledger(self._store)
