"""Maps an image name to a folder and a Python interpreter."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from everstep_lab.node.errors import ImageError

REPOSITORY = Path(__file__).resolve().parents[4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    name: str
    folder: Path | None
    """The folder that is copied for each container. None means an empty folder."""
    python: Path
    """The interpreter that `python` and `python3` start."""
    bin: Path | None
    """A folder of console scripts. It is first on the PATH."""


def load_image(images: Path, name: str) -> Image:
    """Look up an image. Each call reads the file again, so that a retry sees the user's edits.

    Raises:
        ImageError: the name is not in the file, or its folder or interpreter does not exist.
    """
    known = _read(images)
    if name not in known:
        have = ", ".join(sorted(known)) or "none"
        raise ImageError(f'failed to pull image "{name}": not found in {images} (it has: {have})')
    entry = known[name]
    return _build(images, name, entry if isinstance(entry, Mapping) else {})


def _read(images: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(images.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ImageError(f"cannot read {images}: {error}") from None
    known = document.get("images", document)
    return known if isinstance(known, Mapping) else {}


def _build(images: Path, name: str, entry: Mapping[str, Any]) -> Image:
    folder = entry.get("folder")
    path = REPOSITORY / folder if folder else None
    if path is not None and not path.is_dir():
        raise ImageError(f'image "{name}": folder {path} of {images} does not exist')
    python, bin = _interpreter(str(entry.get("python", "lab")))
    if not python.exists():
        raise ImageError(f'image "{name}": interpreter {python} of {images} does not exist')
    return Image(name=name, folder=path, python=python, bin=bin)


def _interpreter(kind: str) -> tuple[Path, Path | None]:
    if kind == "lab":
        return Path(sys.executable), Path(sys.executable).parent
    if kind == "plain":
        return Path(getattr(sys, "_base_executable", sys.executable)), None
    return Path(kind), Path(kind).parent
