"""A file with the progress of a run over all cases, from which a later run continues.

A run belongs to a seed and a version of the code, because results of other code prove nothing about
this one. The file has one JSON document per line: first the plan, then each result as it comes, and
at the end a line that says that the run is finished.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "crash"
CODE = (
    "operator",
    "runtime",
    "charts",
    "tests/agent",
    "tests/crash",
    "tests/stub_image",
    "tests/store",
)
_SUFFIXES = frozenset({".py", ".yaml", ".csv", ".json"})


def hash_code() -> str:
    digest = hashlib.sha256()
    files = [p for folder in CODE for p in (ROOT / folder).rglob("*") if p.suffix in _SUFFIXES]
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:10]


class Journal:
    """`suite` is the name of a long test.

    `seed` 0 stands for the newest unfinished run of this code, or else for a new seed.
    """

    def __init__(self, suite: str, seed: int, folder: Path = FOLDER) -> None:
        stem = f"{suite}-{hash_code()}"
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = [p for p in folder.glob(f"{stem}-*.jsonl") if not _is_finished(p)]
        newest = max(unfinished, key=lambda p: p.stat().st_mtime, default=None)
        if not seed and newest is not None:
            seed = int(newest.stem.rpartition("-")[2])
        self.seed = seed or random.SystemRandom().randrange(1, 10**6)
        self.path = folder / f"{stem}-{self.seed}.jsonl"
        if self.path.exists() and _is_finished(self.path):
            self.path.unlink()
        self._lines = _read(self.path)
        # Remove a partial line that an interrupted run has left, or it would spoil the next line.
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        self.resumed = len(self.done)

    @property
    def plan(self) -> Any:
        """The plan; None if there is none yet."""
        return next((line["plan"] for line in self._lines if "plan" in line), None)

    @property
    def done(self) -> dict[str, Mapping[str, Any]]:
        """The results by case name."""
        return {line["case"]: line for line in self._lines if "case" in line}

    def keep_plan(self, plan: Any) -> None:
        self._append({"plan": plan})

    def keep(self, case: str, **result: object) -> None:
        self._append({"case": case, **result})

    def finish(self) -> None:
        self._append({"finished": True})

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def _is_finished(path: Path) -> bool:
    return any("finished" in line for line in _read(path)[-1:])
