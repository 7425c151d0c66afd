"""`ResilientTrainingJob` as users write it: spec, defaults, bounds, rules. `kubectl explain` shows
these texts.

Foreign input enters here and nowhere else; behind `parse_spec` every value is in bounds.
"""

import enum
import re
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from everstep_contract import names
from everstep_operator.model_status import JobStatus
from everstep_operator.resource import Column, Resource, Scale
from everstep_operator.rules import Resourceful, Rule

NAME_LIMIT = 50
"""A pod is called <name>-<slot>-<attempt> and must fit a label value of 63."""
DEFAULT_SAVE_SECONDS = 300
RUN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
SCHEMES = ("s3://", "gs://", "az://", "file:///")


class IfRunExists(enum.Enum):
    RESUME = "Resume"
    REFUSE = "Refuse"


class GuardAction(enum.Enum):
    NOTE = "Note"
    SAVE_AND_STOP = "SaveAndStop"


class Toleration(Resourceful):
    model_config = ConfigDict(
        extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    key: str | None = Field(
        default=None, max_length=316, description="Taint key that is tolerated."
    )


class PodSpec(Resourceful):
    """Spec of the pods, as in a Deployment."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    rules = (
        Rule(
            at=".nodeName",
            cel="!has(self.nodeName)",
            check=lambda s: s.node_name is None,
            message="nodeName pins every pod to one node, which leaves no way out when it fails: "
            "remove it, use nodeSelector or affinity",
        ),
        Rule(
            at=".tolerations",
            cel="!has(self.tolerations) || self.tolerations.all(t, has(t.key) && "
            f"t.key != '' && t.key != '{names.TAINT_QUARANTINE}')",
            check=lambda s: all(
                t.key and t.key != names.TAINT_QUARANTINE for t in s.tolerations or ()
            ),
            message=f"tolerations: one tolerates the taint {names.TAINT_QUARANTINE} (or has no key, "
            "which tolerates every taint), so pods would go back to a failed node: "
            "remove it, name the keys that you mean",
        ),
    )
    node_name: str | None = Field(
        default=None,
        max_length=253,
        description="Not allowed: it pins every pod to one node, which leaves no way out when that "
        "fails. Use nodeSelector or affinity.",
    )
    tolerations: list[Toleration] | None = Field(
        default=None,
        max_length=64,
        description="Taints that the pods tolerate; each names its key.",
    )


class PodTemplate(Resourceful):
    """metadata (labels, annotations) and spec of the worker pods, as in a Deployment."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    spec: PodSpec = Field(
        description="Pod spec with your own image and `command: [everstep, run, train.py]` in the "
        "container named `trainer` (or the only one). Everstep adds to it: environment EVERSTEP_*, "
        "labels, one port, a memory volume whose size is added to the memory limit, a memory-backed "
        "/dev/shm, affinity away from quarantined nodes, annotations that keep autoscalers away; "
        "restartPolicy becomes OnFailure. With securityContext.runAsNonRoot: true it also gets the "
        "rest of Pod Security `restricted`, where unset.",
    )


class Workers(Resourceful):
    """The pods that train: one for each slot."""

    rules = (
        Rule(
            at=".minReplicas",
            cel="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            check=lambda w: w.min_replicas is None or w.min_replicas <= w.replicas,
            message="minReplicas must be at most replicas: lower minReplicas or raise replicas",
        ),
        Rule(
            at=".maxReplicas",
            cel="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            check=lambda w: w.max_replicas is None or w.replicas <= w.max_replicas,
            message="replicas must be at most maxReplicas: lower replicas or raise maxReplicas",
        ),
    )
    replicas: int = Field(default=1, ge=1, le=4096, description="Pods wanted.")
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Fewest pods that may train; default: replicas, which keeps the size fixed.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Upper bound of replicas (kubectl scale); default: replicas.",
    )
    processes_per_worker: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Training processes in each pod, usually one for each GPU.",
    )
    template: PodTemplate = Field(
        description="Template of the worker pods. A change applies to pods made from then on."
    )

    @property
    def least(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas


class Checkpoint(Resourceful):
    """Where the run lives and how often it is saved."""

    rules = (
        Rule(
            at=".uri",
            cel=" || ".join(f"self.uri.startsWith('{s}')" for s in SCHEMES),
            check=lambda c: c.uri.startswith(SCHEMES),
            message=f"uri must begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}",
            found="'uri is \"' + self.uri + '\": it must begin with "
            f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, as in s3://bucket/folder'",
        ),
        Rule(
            at=".everySteps",
            cel="!has(self.everySteps) || !has(self.everySeconds)",
            check=lambda c: c.every_steps is None or c.every_seconds is None,
            message="everySteps and everySeconds are both set: keep the one that you mean",
        ),
        Rule(
            at=".run",
            cel=f"!has(self.run) || self.run.matches('{RUN}')",
            check=lambda c: c.run is None or re.fullmatch(RUN, c.run) is not None,
            message="run may hold letters, digits, '_', '-', '.', and '/' between parts; "
            "no part begins with '.'",
        ),
        Rule(
            at=".uri",
            cel="self.uri == oldSelf.uri",
            message="uri cannot change, the run would lose its past: make a new job for a new place",
        ),
        Rule(
            at=".run",
            cel="has(self.run) == has(oldSelf.run) && (!has(self.run) || self.run == oldSelf.run)",
            message="run cannot change, the run would lose its past: make a new job for a new run",
        ),
    )
    uri: str = Field(
        min_length=6,
        max_length=1024,
        pattern=r"^[^\s\x00-\x1f]+$",
        description="Folder in an object store: s3://bucket/folder, gs://…, az://…; file:///… for a "
        "volume that all pods share. Endpoint and credentials come from the container's environment.",
    )
    run: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Name of the run below uri: letters, digits, '_', '-', '.', and '/' between parts; "
        "default <namespace>/<name>.",
    )
    if_run_exists: IfRunExists = Field(
        default=IfRunExists.RESUME,
        description="What to do with a run that an earlier job has left there: Resume or Refuse.",
    )
    every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Save whenever the step is a multiple of this.",
    )
    every_seconds: int | None = Field(
        default=None,
        ge=1,
        le=604_800,
        description=f"Save this often; default {DEFAULT_SAVE_SECONDS} if everySteps is not set.",
    )
    keep: int = Field(default=3, ge=1, le=10_000, description="How many good checkpoints are kept.")
    staging_memory: str = Field(
        default="1Gi",
        pattern=r"^[1-9][0-9]{0,11}(Ki|Mi|Gi|Ti|k|M|G|T)?$",
        max_length=16,
        description="Memory of each pod for checkpoints on their way, such as 4Gi, added to the memory "
        "limit of the container: about twice the pod's share of model and optimizer state.",
    )

    @property
    def save_seconds(self) -> int:
        """0 if steps decide."""
        return 0 if self.every_steps else self.every_seconds or DEFAULT_SAVE_SECONDS


class RestartBudgets(Resourceful):
    """How often the job may be interrupted, by cause, before it fails."""

    node: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Moves away from nodes that fail, leave or vanish.",
    )
    pod: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Pods that were deleted, evicted or preempted.",
    )
    worker: int = Field(
        default=20, ge=0, le=1_000_000, description="Worker processes or containers that died."
    )
    hang: int = Field(
        default=5, ge=0, le=1_000_000, description="Steps that took longer than hangSeconds."
    )


class Recovery(Resourceful):
    """Time limits and budgets of recovery."""

    restart_budgets: RestartBudgets = Field(
        default_factory=RestartBudgets, description="Interruptions allowed, by cause."
    )
    drain_timeout_seconds: int = Field(
        default=120,
        ge=1,
        le=86_400,
        description="How long a pod that has to leave may wait for its checkpoint to be committed.",
    )
    gang_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description="How long the job waits for all replicas before it goes on with fewer "
        "(never with fewer than minReplicas).",
    )
    hang_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description="A step that takes longer is a hang, and is recovered.",
    )
    startup_seconds: int = Field(
        default=600,
        ge=1,
        le=86_400,
        description="How long a container may run until its agent calls, and a script until its "
        "first step.",
    )
    node_lost_seconds: int = Field(
        default=60, ge=1, le=86_400, description="A node unreachable for longer is given up."
    )
    force_delete: bool = Field(
        default=False,
        description="Whether a pod stuck on a lost node may be deleted by force. The job goes on "
        "without that; it only frees the name in the API.",
    )


class Guard(Resourceful):
    """What happens when loss or gradient leave their usual range. NaN and infinity always stop."""

    factor: float = Field(
        default=10,
        ge=1,
        le=1_000_000_000,
        description="Trips above this multiple of the rolling mean.",
    )
    action: GuardAction = Field(
        default=GuardAction.NOTE,
        description="Note: write it down; SaveAndStop: save, then fail the job.",
    )


class JobSpec(Resourceful):
    """What is wanted of the job."""

    suspend: bool = Field(
        default=False,
        description="True: save, end all pods, keep the run. False: go on from there.",
    )
    workers: Workers = Field(description="The pods that train.")
    checkpoint: Checkpoint = Field(description="Where the run lives and how often it is saved.")
    recovery: Recovery = Field(
        default_factory=Recovery, description="Time limits and budgets of recovery."
    )
    guard: Guard = Field(
        default_factory=Guard, description="What to do when loss or gradient norm jump."
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2_147_483_647,
        description="The job fails if it has not finished this long after its creation.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2_147_483_647,
        description="The job and its pods are deleted this long after the end; default: never. "
        "The run in the object store stays.",
    )


class SpecError(ValueError):
    """The spec cannot be read; the text names field, value and fix."""


def parse_spec(raw: Any) -> JobSpec:
    """Raises `SpecError`. The API server refuses the same things earlier: see `rules`."""
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("spec", *first["loc"]))
        raise SpecError(f"{where}: {first['msg']}") from None


RESOURCE = Resource(
    kind=names.KIND,
    plural=names.PLURAL,
    short_names=("rtj",),
    scope="Namespaced",
    description="A PyTorch training job that goes on while GPUs, nodes, networks and processes fail.",
    spec_model=JobSpec,
    status_model=JobStatus,
    columns=(
        Column(name="State", path=".status.state"),
        Column(name="Ready", path=".status.world.summary", description="Members / wanted"),
        Column(name="Step", path=".status.step", type="integer"),
        Column(name="Checkpoint", path=".status.checkpoint.step", type="integer"),
        Column(name="Ckpt-Age", path=".status.checkpoint.committedAt", type="date"),
        Column(name="Restarts", path=".status.restarts.total", type="integer"),
        Column(name="Goodput", path=".status.goodput"),
        Column(name="Epoch", path=".status.epoch", type="integer", priority=1),
        Column(name="Why", path=".status.message", priority=1),
    ),
    cel=(
        Rule(
            cel=f"size(self.metadata.name) <= {NAME_LIMIT}",
            message=f"metadata.name: use at most {NAME_LIMIT} characters, "
            "because pods are called <name>-<slot>-<attempt>",
        ),
        Rule(
            cel="self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
            message="metadata.name: use lower-case letters, digits and '-' only (no dots), "
            "because it is part of pod names and labels",
        ),
    ),
    scale=Scale(
        wanted=".spec.workers.replicas", actual=".status.world.ready", selector=".status.selector"
    ),
)
