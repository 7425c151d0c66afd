"""The environment that the operator (on a laptop: the launcher) gives to an agent. One class both
writes and reads it.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_contract import units
from everstep_contract.levels import OnLoss

PREFIX = "EVERSTEP_"
AGENT_SOCKET = "EVERSTEP_AGENT_SOCKET"
"""Set by the agent for its workers: path of the unix socket."""
POSITION_FILE = "EVERSTEP_POSITION_FILE"
GROUP_FORMING = "EVERSTEP_GROUP_FORMING"
"""Set by users: how each epoch's group is formed."""
FOR_USERS = frozenset({GROUP_FORMING})
"""Variables with the prefix that a pod template may set."""
MESH = "EVERSTEP_MESH"
"""As `units.parse` reads it; not set: each rank is a unit."""


class EnvError(ValueError):
    """An environment variable is missing or invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnv:
    """Field `pod_ip` is the variable EVERSTEP_POD_IP, and so on."""

    job: str
    """namespace/name"""
    job_uid: str
    slot: int
    attempt: int
    token: str
    pod_ip: str
    port: int = 7070
    workers: int = 1
    """Worker processes in this pod (processes per worker)."""
    mesh: units.Mesh = units.ONE_RANK
    """How the job's ranks form units, as `shard=2,tensor=1`; the same for all pods of a job, for
    its whole life.
    """
    uri: str
    """Where checkpoints go: s3://bucket/prefix, file:///path, gs://…, az://…"""
    run: str
    """The run is `<uri>/<run>/`."""
    run_given: int = 0
    """1: the job's spec names the run, so another job may have written it; 0: the run is named after the
    job.
    """
    if_run_exists: str = "Resume"
    save_every_steps: int = 0
    save_every_seconds: int = 0
    keep: int = 3
    hang_seconds: float = 300.0
    startup_seconds: float = 600.0
    drain_seconds: float = 120.0
    gang_seconds: float = 300.0
    grace_seconds: float = 25.0
    guard_factor: float = 10.0
    guard_action: str = "Note"
    in_place: int = 0
    """1: members that survive a loss continue in the same step; 0: all restart."""
    on_loss: str = OnLoss.SHRINK.value
    below_min_seconds: float = 1800.0
    """How long the job may train with fewer pods than its minimum, after losses."""
    max_redo_seconds: float = 30.0
    """How many seconds of training may be repeated after a loss that leaves no whole copy of the
    model. Near saves are made as often as this requires. 0: none are made.
    """
    memory: str
    """A folder in memory that survives restarts of the container."""
    peer_bandwidth: int = 128 * 2**20
    """Bytes a second at which this pod sends copies of its saves to another pod's memory; 0: none."""
    read_back_bandwidth: int = 128 * 2**20
    """Bytes a second at which this pod reads its share of a new checkpoint back from the store."""
    disk_tier: str | None = None
    """A folder on a disk of the node for copies of this pod's saves."""
    disk_seconds: float = 0.0
    """The least time in seconds between two copies to `disk_tier`."""
    termination_log: str = "/dev/termination-log"
    zygote: int | None = None
    """0: each worker is a fresh interpreter. Otherwise it is forked from a process that has
    imported torch (pod/README.md of the agent).
    """
    preload: str | None = None
    """The user's modules that the zygote imports, separated by commas."""
    warm: str | None = None
    """Modules that the zygote imports in place of torch and what belongs to it, for scripts that
    need no torch.
    """

    def to_env(self) -> dict[str, str]:
        return {
            PREFIX + f.name.upper(): str(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is not None
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "AgentEnv":
        """Raises `EnvError`, which names the variable, its value and what is expected."""
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name = PREFIX + field.name.upper()
            raw = environ.get(name)
            if raw is None:
                if field.default is dataclasses.MISSING:
                    raise EnvError(f"{name} is not set; the operator sets it in every worker pod")
                continue
            values[field.name] = _convert(name, hints[field.name], raw)
        found = cls(**values)
        if problem := found.mesh.why_not_slots(found.workers):
            raise EnvError(f"{PREFIX}MESH={found.mesh}: {problem}")
        return found


def _convert(name: str, hint: Any, raw: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if hint is units.Mesh:
        try:
            return units.parse(raw)
        except ValueError as error:
            raise EnvError(f"{name}={raw!r}: {error}") from None
    try:
        return hint(raw)
    except ValueError:
        raise EnvError(f"{name}={raw!r}: expected {hint.__name__}") from None


def in_cluster(environ: Mapping[str, str]) -> bool:
    """Whether an operator started this process; otherwise `everstep run` is a run on one machine."""
    return PREFIX + "JOB_UID" in environ
