"""A virtual environment for the peers, so that none changes the packages of Everstep's own."""

import subprocess
import sys
from pathlib import Path

PINS = ("torch-checkpointing==0.1.1", "torch>=2.15,<2.16", "numpy")
FOLDER = Path("build/bench/env/checkpoint")


def make() -> Path:
    """Make the environment unless it is there. Returns its Python. Raises `CalledProcessError`."""
    python = FOLDER.absolute() / "bin/python"
    marker = FOLDER / ".complete"
    if marker.exists() and marker.read_text() == " ".join(PINS):
        return python
    print(f"making the environment of the peers in {FOLDER}", file=sys.stderr, flush=True)
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--clear", str(FOLDER)], check=True)
    install = [uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python)]
    subprocess.run([*install, *PINS], check=True)
    marker.write_text(" ".join(PINS))
    return python
