"""The file of raw results: one row per run. Several benchmarks may write to it at the same time."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep_recovery.table import Row


def read(file: Path) -> list[Row]:
    """The rows so far; none if there is no file."""
    if not file.exists():
        return []
    rows: list[Row] = json.loads(file.read_text())
    return rows


def append(file: Path, row: Row) -> None:
    """Add a row. The file is whole at any moment, also if this process is killed while it writes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.with_suffix(".lock")):
        new = file.with_suffix(".new")
        new.write_text(json.dumps([*read(file), row], indent=1))
        new.replace(file)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
