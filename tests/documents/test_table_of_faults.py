"""The table of faults names only tests that exist, and lacks no number."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+) \| [^|]+ \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def read_rows() -> dict[int, str]:
    return {int(number): cell for number, cell in ROW.findall((TESTS / "README.md").read_text())}


def test_every_fault_has_its_row() -> None:
    assert sorted(read_rows()) == list(range(1, 95))


def test_every_test_that_is_named_exists() -> None:
    missing = [name for cell in read_rows().values() for name in _named(cell) if not _exists(name)]
    assert not missing


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+\.py[^`]*)`", cell)


def _exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = (TESTS.parent if file.startswith("e2e/") else TESTS) / file
    return path.is_file() and f"def {test}(" in path.read_text() if test else path.is_file()
