"""The node's faults, kept on its disk: a restarted lab-node container continues with them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep_lab.exporter.gpu import Gpu, HealthIncident, XidEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """One injected fault. `code` and `seed` determine its effects."""

    gpu: int
    code: int
    seed: int
    at: float
    """A time on the monotonic clock, which all containers of a machine share until it reboots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    boot: str
    """The machine's boot id. A reboot invalidates monotonic times and ends all faults."""
    base: tuple[Gpu, ...] = ()
    """The GPUs as they were after the last reload of the driver; empty if they are new."""
    faults: tuple[Begun, ...] = ()
    exporter: str = "ok"


def load_state(path: Path, boot: str) -> State:
    """Read the state, or return a new one if the file is missing or incomplete.

    After a reboot of the machine, only `base` is kept.
    """
    try:
        document = json.loads(path.read_text())
        state = _read(document)
    except (OSError, ValueError, KeyError, TypeError):
        return State(boot=boot)
    return state if state.boot == boot else State(boot=boot, base=state.base)


def put_state(path: Path, state: State) -> None:
    making = path.with_suffix(".new")
    making.write_text(json.dumps(asdict(state)))
    os.replace(making, path)


def _read(document: dict[str, Any]) -> State:
    return State(
        boot=document["boot"],
        base=tuple(_gpu(one) for one in document["base"]),
        faults=tuple(Begun(**one) for one in document["faults"]),
        exporter=document["exporter"],
    )


def _gpu(document: dict[str, Any]) -> Gpu:
    xids = tuple(XidEvent(**one) for one in document["xids"])
    health = tuple(HealthIncident(**one) for one in document["health"])
    return Gpu(**{**document, "xids": xids, "health": health})
