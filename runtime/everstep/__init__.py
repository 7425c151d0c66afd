"""Everstep in a training script: `everstep.run(main)`, and the `Job` that `main` gets."""

from importlib.metadata import PackageNotFoundError, version

from everstep.errors import EverstepError, Misuse, NotUnderAgent, StateError
from everstep.job import Job
from everstep.loading import Loaded, load
from everstep.step import Step
from everstep.worker import run

try:
    __version__ = version("everstep")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "EverstepError",
    "Job",
    "Loaded",
    "Misuse",
    "NotUnderAgent",
    "StateError",
    "Step",
    "__version__",
    "load",
    "run",
]
