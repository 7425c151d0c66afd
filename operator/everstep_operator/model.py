"""`ResilientTrainingJob` as users write it: spec, defaults, bounds, rules. `kubectl explain` shows
these texts.

User input is validated here and nowhere else; after `parse_spec` every value is in bounds.
"""

import enum
import re
from typing import Any

from pydantic import Field, ValidationError

from everstep_contract import names
from everstep_contract.levels import OnLoss
from everstep_operator.model_parallelism import RULES, Parallelism
from everstep_operator.model_status import JobStatus
from everstep_operator.model_template import PodTemplate
from everstep_operator.resource import Column, Resource, Scale
from everstep_operator.rules import Rule, UserInput

MOST_SLOTS = 4096
MOST_SPARES = 64
DEFAULT_SAVE_SECONDS = 300
DEFAULT_REPLACE_SECONDS = 25
LEAST_REPLACE_SECONDS = 10
"""A kubelet renews its node's lease every 10 s, so a shorter silence tells nothing."""
SCHEMES = ("s3://", "gs://", "az://", "file:///")
PLACE = "^(file:///[^?#%]*|(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=@+-]{1,200})*/?)$"
"""What the agents accept as an address: nothing that a URL parser would remove, resolve or decode.
"""
UPWARDS = "/[.]{1,2}(/|$)"
INVISIBLE = "\\s\\p{Z}\\x00-\\x1f\\x7f-\\x9f\\x{200b}-\\x{200f}\\x{202a}-\\x{202e}\\x{2060}-\\x{2069}\\x{feff}"
"""Spaces, control characters, and characters that change the text direction or have no width."""


STAGING_MEMORY = "^[1-9]([0-9]{0,14}|[0-9]{0,8}(Ki|k|Mi|M)|[0-9]{0,5}(Gi|G)|[0-9]{0,2}(Ti|T))$"
PEER_BANDWIDTH = "^(0|[1-9]([0-9]{0,14}|[0-9]{0,8}(Ki|k|Mi|M)|[0-9]{0,5}(Gi|G)))$"
READ_BACK_BANDWIDTH = "^[1-9]([0-9]{0,8}(Mi|M)|[0-9]{0,5}(Gi|G))$"


def _has_form(field: str, attribute: str, form: str, fix: str, *, optional: bool = False) -> Rule:
    """The API server would answer a `pattern` of the schema with the regular expression alone."""

    def check(part: Any) -> bool:
        value = getattr(part, attribute)
        return value is None or re.fullmatch(form, value) is not None

    absent, quoted = f"!has(self.{field}) || " if optional else "", fix.replace("'", "\\'")
    return Rule(
        at=f".{field}",
        cel=f"{absent}self.{field}.matches('{form}')",
        check=check,
        message=f"{field}: {fix}",
        found=f"'{field} is \"' + self.{field} + '\": {quoted}'",
    )


_OF_A_SCHEME = " || ".join(f"self.uri.startsWith('{s}')" for s in SCHEMES)


class IfRunExists(enum.Enum):
    RESUME = "Resume"
    REFUSE = "Refuse"


class GuardAction(enum.Enum):
    NOTE = "Note"
    SAVE_AND_STOP = "SaveAndStop"


class Workers(UserInput):
    """The worker pods, one for each slot."""

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
        Rule(
            at=".spares",
            cel=f"self.replicas + self.spares <= {MOST_SLOTS}",
            check=lambda w: w.replicas + w.spares <= MOST_SLOTS,
            message=f"replicas and spares must be at most {MOST_SLOTS} together: lower spares",
        ),
        Rule(
            at=".processesPerWorker",
            cel="self.processesPerWorker == oldSelf.processesPerWorker",
            message="processesPerWorker cannot change, because pods created before and after "
            "the edit would have different numbers of ranks: create a new job, with checkpoint.run "
            "set to this job's run to continue it",
        ),
    )
    replicas: int = Field(default=1, ge=1, le=MOST_SLOTS, description="Pods wanted.")
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
    spares: int = Field(
        default=0,
        ge=0,
        le=MOST_SPARES,
        description="Pods besides replicas that hold a node and wait: one takes the place of a lost pod at "
        "once, and the lost pod's next one becomes the spare. minReplicas, maxReplicas and kubectl scale do "
        "not count them; quotas do. They are given back while pods of other jobs lack room to train.",
    )
    processes_per_worker: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Training processes in each pod, usually one per GPU.",
    )
    template: PodTemplate = Field(
        description="Template of the worker pods. A change applies to pods created from then on."
    )

    @property
    def least(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas


class Checkpoint(UserInput):
    """Where the run is stored and how often it is saved."""

    rules = (
        Rule(
            at=".uri",
            cel=_OF_A_SCHEME,
            check=lambda c: c.uri.startswith(SCHEMES),
            message=f"uri must begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}",
            found="'uri is \"' + self.uri + '\": it must begin with "
            f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, as in s3://bucket/folder'",
        ),
        Rule(
            at=".uri",
            cel=f"!({_OF_A_SCHEME}) || (self.uri.matches('{PLACE}') && !self.uri.matches('{UPWARDS}'))",
            check=lambda c: (
                re.fullmatch(PLACE, c.uri) is not None and not re.search(UPWARDS, c.uri)
            ),
            message="uri may hold a bucket and a folder: letters, digits and . _ = @ + - between "
            "single slashes, no part . or .., no user, query, fragment or %: credentials "
            "and endpoint belong in the container's environment",
        ),
        _has_form(
            "stagingMemory",
            "staging_memory",
            STAGING_MEMORY,
            "write a whole number of bytes, or with Ki, Mi, Gi, Ti, k, M, G or T, below 1000Ti, such as 4Gi",
        ),
        _has_form(
            "peerBandwidth",
            "peer_bandwidth",
            PEER_BANDWIDTH,
            "write a whole number of bytes a second, or with Ki, Mi, Gi, k, M or G, such as 128Mi; 0: no copies",
        ),
        _has_form(
            "readBackBandwidth",
            "read_back_bandwidth",
            READ_BACK_BANDWIDTH,
            "write a whole number with Mi, Gi, M or G, such as 128Mi, for bytes a second",
        ),
        _has_form("pin", "pin", f"^{names.PIN}$", f"use {names.PIN_RULE}", optional=True),
        Rule(
            at=".diskPath",
            cel="!has(self.diskPath) || self.diskPath.startsWith('/')",
            check=lambda c: c.disk_path is None or c.disk_path.startswith("/"),
            message="diskPath must be an absolute path, such as /local/everstep",
            found="'diskPath is \"' + self.diskPath + '\": write an absolute path, such as /local/everstep'",
        ),
        Rule(
            at=".everySteps",
            cel="!has(self.everySteps) || !has(self.everySeconds)",
            check=lambda c: c.every_steps is None or c.every_seconds is None,
            message="everySteps and everySeconds are both set: keep one of them",
        ),
        Rule(
            at=".run",
            cel=f"!has(self.run) || self.run.matches('{names.RUN}')",
            check=lambda c: c.run is None or re.fullmatch(names.RUN, c.run) is not None,
            message="run may hold letters, digits, '_', '-', '.', and '/' between parts; "
            "no part begins with '.'",
        ),
        Rule(
            at=".uri",
            cel="self.uri == oldSelf.uri",
            message="uri cannot change, because the run would lose its checkpoints: create a "
            "new job for another location",
        ),
        Rule(
            at=".run",
            cel="has(self.run) == has(oldSelf.run) && (!has(self.run) || self.run == oldSelf.run)",
            message="run cannot change, because the run would lose its checkpoints: create a "
            "new job for another run",
        ),
        Rule(
            at=".ifRunExists",
            cel="self.ifRunExists == oldSelf.ifRunExists",
            message="ifRunExists cannot change, because it is read only once, when the job starts: "
            "create a new job",
        ),
    )
    uri: str = Field(
        min_length=6,
        max_length=1024,
        pattern=f"^[^{INVISIBLE}]+$",
        description="Folder in an object store: s3://bucket/folder, gs://…, az://…; file:///… for a "
        "volume that all pods share. Endpoint and credentials come from the container's environment.",
    )
    run: str | None = Field(
        default=None,
        min_length=1,
        max_length=names.RUN_LIMIT,
        description="Name of the run below uri: letters, digits, '_', '-', '.', and '/' between parts; "
        "default <namespace>/<name>.",
    )
    if_run_exists: IfRunExists = Field(
        default=IfRunExists.RESUME,
        strict=False,
        description="What to do with an existing run of an earlier job: Resume or Refuse.",
    )
    every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Save whenever the step is a multiple of this. A change takes effect at a checkpoint, from which "
        "all ranks restart; no step is lost.",
    )
    every_seconds: int | None = Field(
        default=None,
        ge=1,
        le=604_800,
        description=f"Save this often; default {DEFAULT_SAVE_SECONDS} if everySteps is not set.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=10_000,
        description="How many good checkpoints are kept, besides those that are pinned.",
    )
    pin: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description="Save one checkpoint now and keep it under this name, whatever keep says; status.pinned "
        "shows it. A run uses each name once: if it has this name already, nothing is saved. `kubectl everstep "
        "checkpoint` sets it; `kubectl everstep checkpoints unpin` removes the pin, and the name stays used.",
    )
    staging_memory: str = Field(
        default="1Gi",
        max_length=16,
        description="Memory of each pod for checkpoints before their upload, such as 4Gi (below "
        "1000Ti), added to the memory limit of the container: about four times the pod's "
        "share of model and optimizer state, two for its own saves and two for copies of "
        "another pod's; and at least what the pod loads after a restart: the complete state, or "
        "its share of it if a unit takes several pods. A change applies to pods created from then on.",
    )
    peer_bandwidth: str = Field(
        default="128Mi",
        max_length=16,
        description="Bytes a second at which each pod copies its saves into the memory of a pod on "
        "another node (in another rack, where nodes have the label topology.kubernetes.io/rack), "
        "such as 128Mi; 0: no copies. A change applies to pods created from then on.",
    )
    read_back_bandwidth: str = Field(
        default="128Mi",
        max_length=16,
        description="Bytes a second at which each pod reads its share of a new checkpoint back from "
        "the store, such as 128Mi; at least 1M. Uploads go first. A change applies to pods created "
        "from then on.",
    )
    disk_path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Folder of a volume on a disk of the node, which the template mounts: each pod "
        "copies its saves there, too. A change applies to pods created from then on.",
    )
    disk_seconds: int = Field(
        default=0,
        ge=0,
        le=604_800,
        description="Least number of seconds between two copies to diskPath; 0: each save is copied. "
        "A change applies to pods created from then on.",
    )

    @property
    def save_seconds(self) -> int:
        """0 if the interval is in steps."""
        return 0 if self.every_steps else self.every_seconds or DEFAULT_SAVE_SECONDS


class RestartBudgets(UserInput):
    """Maximum restarts per kind within a window before the job fails."""

    window_seconds: int = Field(
        default=86_400,
        ge=60,
        le=2_592_000,
        description="Length of the window in seconds, with a resolution of a 24th.",
    )
    node: int = Field(
        default=1000, ge=0, le=1_000_000, description="Faults of nodes, GPUs and the network."
    )
    pod: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Pods that were deleted, evicted, preempted or lost, and checkpoints that could not be "
        "read or made.",
    )
    worker: int = Field(
        default=20,
        ge=0,
        le=1_000_000,
        description="Training processes that were killed, crashed or raised an exception.",
    )
    hang: int = Field(
        default=5,
        ge=0,
        le=1_000_000,
        description="Ranks that exceeded hangSeconds, startupSeconds or the limit of a job.pause.",
    )


class Recovery(UserInput):
    """What happens after a loss, with its time limits and budgets."""

    rules = (
        Rule(
            at=".replaceAfterSeconds",
            cel="!has(self.replaceAfterSeconds) || self.replaceAfterSeconds <= self.nodeLostSeconds",
            check=lambda r: (
                r.replace_after_seconds is None or r.replace_after_seconds <= r.node_lost_seconds
            ),
            message="replaceAfterSeconds must be at most nodeLostSeconds: lower replaceAfterSeconds "
            "or raise nodeLostSeconds",
        ),
    )
    in_place: bool = Field(
        default=True,
        description="True: workers that survive a loss go on in the same step, and the lost one joins "
        "them again. False: all restart from a checkpoint that they save first.",
    )
    on_loss: OnLoss = Field(
        default=OnLoss.SHRINK,
        strict=False,
        description="With inPlace. Shrink: the others go on while the lost worker is replaced. Wait: they save "
        "the step and wait, and then all restart from that save, so that the run equals an undisturbed "
        "one bit for bit.",
    )
    below_min_seconds: int = Field(
        default=1800,
        ge=0,
        le=2_147_483_647,
        description="How long the job may train with fewer than minReplicas pods after losses; then it saves, and "
        "waits for more pods.",
    )
    max_redo_seconds: int = Field(
        default=30,
        ge=0,
        le=86_400,
        description="Seconds of training that may be repeated after a loss that leaves no whole copy of the model. For "
        "that, pods keep saves in memory if workers hold parts of the model, or if there is one worker; less often "
        "where they would delay the steps by more than 1 %. 0: no such saves; the job goes back to the newest "
        "checkpoint.",
    )
    restart_budgets: RestartBudgets = Field(
        default_factory=RestartBudgets,
        description="Interruptions allowed within a window, by kind.",
    )
    drain_timeout_seconds: int = Field(
        default=120,
        ge=1,
        le=86_400,
        description="How long a leaving pod may wait for its checkpoint to be committed.",
    )
    gang_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description="How long the job waits for all replicas before it continues with fewer. "
        "With fewer than minReplicas it gives its pods back, so that other jobs can "
        "use the nodes, and tries again after a pause.",
    )
    hang_seconds: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description="Time limit of a step. Everstep ends a rank that exceeds it, and recovers. A rank for which all "
        "others wait is ended sooner, after the limit that it has learnt from its own steps.",
    )
    startup_seconds: int = Field(
        default=600,
        ge=1,
        le=86_400,
        description="Time limit for a container until its agent answers, and for a script until "
        "its first step.",
    )
    node_lost_seconds: int = Field(
        default=60,
        ge=1,
        le=86_400,
        description="A node that is not Ready for longer is given up, and its pod is replaced. Time after all nodes "
        "that could run the job's pods were lost together does not count, until one of them is Ready.",
    )
    replace_after_seconds: int | None = Field(
        default=None,
        ge=LEAST_REPLACE_SECONDS,
        le=86_400,
        description="How long a node may renew no lease, while other nodes renew theirs and the job's other pods hear "
        "nothing from the pod on it. After that the pod is replaced, if the job can continue without it. "
        f"At least {LEAST_REPLACE_SECONDS}, at most nodeLostSeconds; default {DEFAULT_REPLACE_SECONDS}, or "
        "nodeLostSeconds if that is less.",
    )
    force_delete: bool = Field(
        default=False,
        description="Whether a pod stuck on a lost node may be deleted by force. The job continues "
        "without that; it only frees the name in the API.",
    )

    @property
    def replace_seconds(self) -> int:
        if self.replace_after_seconds is not None:
            return self.replace_after_seconds
        return max(LEAST_REPLACE_SECONDS, min(DEFAULT_REPLACE_SECONDS, self.node_lost_seconds))


class Guard(UserInput):
    """The reaction when loss or gradient norm leave their usual range. A loss that is NaN or infinite
    always stops the job. With `Note` the norm is an estimate.
    """

    factor: float = Field(
        default=10,
        ge=1,
        le=1_000_000_000,
        description="A loss or gradient norm above this multiple of its rolling mean is a spike.",
    )
    action: GuardAction = Field(
        default=GuardAction.NOTE,
        strict=False,
        description="Note: record it in the status; SaveAndStop: save, then fail the job.",
    )


class JobSpec(UserInput):
    """The desired state of the job."""

    rules = RULES
    suspend: bool = Field(
        default=False,
        description="True: save, end all pods, keep the run. False: continue from there.",
    )
    workers: Workers = Field(description="The worker pods.")
    parallelism: Parallelism = Field(
        default_factory=Parallelism,
        json_schema_extra={"default": {"shard": 1, "tensor": 1}},
        description="How ranks divide the model; default: each rank holds all of it. replicas, minReplicas and "
        "spares are whole numbers of units. The pods of a unit prefer one node, NVLink domain, rack and zone.",
    )
    checkpoint: Checkpoint = Field(description="Where the run is stored and how often it is saved.")
    recovery: Recovery = Field(
        default_factory=Recovery, description="Time limits and budgets of recovery."
    )
    guard: Guard = Field(
        default_factory=Guard,
        description="The reaction to a spike of loss or gradient norm. A change takes effect at a checkpoint, from "
        "which all ranks restart; no step is lost.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2_147_483_647,
        description="The job fails if it has not finished this long after its creation; time spent "
        "suspended does not count.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2_147_483_647,
        description="The job and its pods are deleted this long after the end; default: never. "
        "The run in the object store is kept.",
    )


class SpecError(ValueError):
    """The spec is invalid; the text names field, value and fix."""


def parse_spec(raw: Any) -> JobSpec:
    """Raises `SpecError`. The API server rejects the same input earlier: see `rules`."""
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("spec", *first["loc"]))
        raise SpecError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


RESOURCE = Resource(
    kind=names.KIND,
    plural=names.PLURAL,
    short_names=("rtj",),
    scope="Namespaced",
    description="A PyTorch training job that continues while GPUs, nodes, networks and processes "
    "fail.",
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
        Column(
            name="Observed",
            path=".status.observedAt",
            type="date",
            priority=1,
            description="Age of these figures: small while steps advance and an operator runs",
        ),
        Column(name="Why", path=".status.message", priority=1),
    ),
    cel=(
        Rule(
            cel=f"size(self.metadata.name) <= {names.JOB_NAME_LIMIT}",
            message=f"metadata.name: use at most {names.JOB_NAME_LIMIT} characters, because pods are named "
            "<name>-<slot>-<attempt>",
        ),
        Rule(
            cel=f"self.metadata.name.matches('{names.JOB_NAME}')",
            message="metadata.name: use lower-case letters, digits and '-' only (no dots), "
            "because it is part of pod names and labels",
        ),
    ),
    scale=Scale(
        wanted=".spec.workers.replicas", actual=".status.world.ready", selector=".status.selector"
    ),
)
