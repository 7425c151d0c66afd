"""What a worker of the storm writes for the witness: one file for each life, to which it appends
one JSON line at a time.
"""

import json
import os
import time
from pathlib import Path

from everstep_contract import env


class Record:
    """First the worker's identity. Then for each step the samples that it contributes, written before
    other ranks can have them, and its state after the step, written before it reports the step.
    """

    def __init__(self, *, epoch: int, rank: int, world: int, start: int, digest: str) -> None:
        slot, attempt = (int(os.environ[env.PREFIX + name]) for name in ("SLOT", "ATTEMPT"))
        name = f"{epoch}-{slot}-{attempt}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        path = Path(os.environ["STORM_RECORDS"], name)
        self._out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        who = {"slot": slot, "attempt": attempt, "epoch": epoch, "rank": rank, "world": world}
        self._write(**who, start=start, digest=digest)

    def used(self, step: int, samples: tuple[int, ...]) -> None:
        self._write(used=step, samples=samples)

    def applied(self, step: int, digest: str) -> None:
        self._write(applied=step, digest=digest)

    def _write(self, **fields: object) -> None:
        line = json.dumps({**fields, "at": time.monotonic()}) + "\n"
        os.write(self._out, line.encode())
