"""The file of raw results: two benchmarks that run at the same time keep each other's rows."""

import os
import subprocess
import sys
from pathlib import Path

from everstep_recovery import results

ROWS = 40
WRITER = """
import sys
from pathlib import Path
from everstep_recovery import results

for run in range(int(sys.argv[3])):
    results.append(Path(sys.argv[1]), {"system": sys.argv[2], "run": run})
"""


def test_a_file_that_does_not_exist_has_no_rows(tmp_path: Path) -> None:
    assert results.read(tmp_path / "recovery.json") == []


def test_two_writers_lose_no_row(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "recovery.json"
    environ = {**os.environ, "PYTHONPATH": str(Path(results.__file__).parents[1])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(file), system, str(ROWS)], env=environ)
        for system in ("a", "b")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = sorted((row["system"], row["run"]) for row in results.read(file))
    assert found == [(system, run) for system in ("a", "b") for run in range(ROWS)]
