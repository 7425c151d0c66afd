"""A virtual environment for each torch version of the peers. None changes Everstep's packages."""

import subprocess
import sys
from pathlib import Path

PINS = {
    "checkpoint": ("torch-checkpointing==0.1.1", "torch>=2.15,<2.16", "numpy"),
    # As in benchmarks/recovery, which uses the same one.
    "dlrover": ("dlrover[k8s]==0.6.1", "protobuf", "torch==2.7.1", "numpy", "setuptools<81"),
    "ckpt-chaos": ("ckpt-chaos==0.1.8",),
}
FOLDER = Path("build/bench/env")
DLROVER = "dlrover flash"
"""The system in the table that has an environment of its own."""


def find(system: str) -> str:
    """The environment that a peer of the table runs in."""
    return "dlrover" if system == DLROVER else "checkpoint"


def make(name: str) -> Path:
    """Create the environment if it is missing. Returns its Python. Raises `CalledProcessError`."""
    folder = FOLDER.absolute() / name
    python, marker = folder / "bin/python", folder / ".complete"
    if marker.exists() and marker.read_text() == " ".join(PINS[name]):
        return python
    print(f"making the environment of {name} in {folder}", file=sys.stderr, flush=True)
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--clear", str(folder)], check=True)
    install = [uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python)]
    subprocess.run([*install, *PINS[name]], check=True)
    marker.write_text(" ".join(PINS[name]))
    return python
