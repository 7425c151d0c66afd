"""Loads images into the nodes of a kind cluster."""

import threading
from collections.abc import Sequence
from pathlib import Path

from everstep_lab.kind import tools
from everstep_lab.seam import LabError


class Archive:
    """An archive of several images, so that shared layers are copied once. A thread writes it."""

    def __init__(self, path: Path, tags: Sequence[str], nodes: Sequence[str]) -> None:
        self._path, self._tags, self._nodes = path, tags, nodes
        self._error: LabError | None = None
        self._thread = threading.Thread(target=self._save, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, cluster: str) -> None:
        """Load the archive into its nodes. Raises LabError if writing or loading it fails."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        argv = [tools.find("kind"), "load", "image-archive", str(self._path), "--name", cluster]
        tools.run([*argv, "--nodes", ",".join(self._nodes)], timeout=600)
        self._path.unlink()

    def _save(self) -> None:
        try:
            tools.docker("save", "--output", str(self._path), *self._tags, timeout=300)
        except LabError as error:
            self._error = error
