"""The finished cases of a long suite, so that a stopped run can continue.

They are kept under a digest of the tested code. With other code, all cases run again.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "finished"


class Finished:
    """The file of one suite, with one name per line. Delete it, or the folder, to start over."""

    def __init__(self, suite: str, digest: str, folder: Path = FOLDER) -> None:
        self.path = folder / f"{suite}-{digest}.txt"
        self._names = set(self.path.read_text().splitlines()) if self.path.exists() else set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        self._names.add(name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(name + "\n")


def digest_of(places: Iterable[str | Path]) -> str:
    """Return the digest of these files and of all Python files in these folders.

    `places` are relative to the repository.
    """
    found = hashlib.sha256()
    for place in map(ROOT.joinpath, places):
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]
