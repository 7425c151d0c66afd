"""A virtual environment for each peer, so that no peer changes Everstep's own packages."""

import subprocess
import sys
from pathlib import Path

from everstep_recovery.systems import environment

PINS = {
    "torchft": ("torchft==0.2.0", "torch>=2.15,<2.16", "numpy"),
    "dlrover": ("dlrover[k8s]==0.6.1", "protobuf", "torch==2.7.1", "numpy", "setuptools<81"),
    "nvrx": ("nvidia-resiliency-ext==0.4.1", "torch>=2.15,<2.16", "numpy", "setuptools"),
}


def make(name: str) -> None:
    """Create the environment if it is missing. Raises `CalledProcessError`; uv prints why."""
    python = environment(name)
    marker = python.parent.parent / ".complete"
    if marker.exists() and marker.read_text() == " ".join(PINS[name]):
        return
    print(
        f"making the environment of {name} in {python.parent.parent}", file=sys.stderr, flush=True
    )
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--clear", str(python.parent.parent)], check=True)
    install = [uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python)]
    subprocess.run([*install, *PINS[name]], check=True)
    marker.write_text(" ".join(PINS[name]))
