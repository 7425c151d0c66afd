"""Jobs on the lab with real agents and stub workers, without torch (see `agent/stub_worker.py`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep_demo.board import Object
from everstep_demo.trial import build_job

IMAGES = str(Path(__file__).with_name("images.yaml"))
IMAGE = "everstep/stub:test"
COMMAND = ("everstep", "run", "--no-zygote", "train.py")
"""A stub imports no torch, so a zygote could import nothing for it."""


def build_stub_job(
    name: str,
    *,
    replicas: int = 2,
    until: int = 1_000_000,
    step_ms: int = 50,
    mode: str = "",
    spec: Mapping[str, Any] | None = None,
    workers: Mapping[str, Any] | None = None,
) -> Object:
    """Build a job with `build_job`, then apply `spec` and `workers`."""
    env = {"STUB_UNTIL": str(until), "STUB_STEP_MS": str(step_ms), "STUB_MODE": mode}
    job = build_job(
        name, replicas=replicas, image=IMAGE, command=COMMAND, env=env, spec=dict(spec or {})
    )
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
    job["spec"]["workers"].update(workers or {})
    return job
