"""`ResilientTrainingJob` as we report it. Output only, with two exceptions that are written before
the deed they count: the attempts of the slots and the counters of restarts.
"""

from pydantic import Field

from everstep_operator.rules import Resourceful


class Condition(Resourceful):
    type: str = Field(max_length=316, description="Name of the condition.")
    status: str = Field(max_length=16, description="True, False or Unknown.")
    observed_generation: int = Field(
        default=0, description="Generation of the spec that this speaks of."
    )
    last_transition_time: str = Field(
        max_length=40,
        description="When status last changed.",
        json_schema_extra={"format": "date-time"},
    )
    reason: str = Field(max_length=1024, description="One CamelCase word.")
    message: str = Field(max_length=32768, description="A sentence for people.")


class WorldStatus(Resourceful):
    ready: int = Field(
        default=0, description="Pods whose workers are members of the running epoch."
    )
    desired: int = Field(default=0, description="Pods wanted.")
    summary: str = Field(
        default="", max_length=32, description="ready/desired, for the printed column."
    )


class CheckpointStatus(Resourceful):
    step: int = Field(default=0, description="Step after which it was taken.")
    epoch: int = Field(default=0, description="Epoch that took it.")
    bytes: int = Field(default=0, description="Its size.", json_schema_extra={"format": "int64"})
    committed_at: str | None = Field(
        default=None,
        max_length=40,
        description="When it was committed: seen on this cluster's clock.",
        json_schema_extra={"format": "date-time"},
    )
    age_seconds: int = Field(default=0, description="Its age at observedAt.")


class Restarts(Resourceful):
    total: int = Field(
        default=0,
        description="Interruptions over the life of this job: each once, by whoever has counted more.",
    )
    by_cause: dict[str, int] = Field(
        default_factory=dict,
        description="Interruptions by cause, in the operator's words (NodeLeaving, PodDeleted, …) and "
        "in the job's (Leave, WorkerDied, …); one that both have noticed stands under both.",
    )


class SlotStatus(Resourceful):
    """The record of one slot; the only part of status that is read back as input."""

    slot: int = Field(description="Number of the slot.")
    attempt: int = Field(description="Its current attempt: the pod <job>-<slot>-<attempt>.")
    pod_uid: str | None = Field(
        default=None, max_length=64, description="UID of that pod, once it was seen."
    )
    node: str | None = Field(default=None, max_length=253, description="Node that it runs on.")
    cause: str | None = Field(default=None, max_length=64, description="Why there is this attempt.")
    former_node: str | None = Field(
        default=None, max_length=253, description="Node of the attempt before."
    )
    leaving_since: str | None = Field(
        default=None,
        max_length=40,
        description="Since when it has been asked to leave.",
        json_schema_extra={"format": "date-time"},
    )
    incident: str | None = Field(
        default=None, max_length=128, description="The incident that moves it."
    )


class Mark(Resourceful):
    name: str = Field(max_length=32, description="signal, verdict, cordon, leave, commit, left, …")
    seconds: float = Field(description="Seconds since the incident began, on the operator's clock.")


class PhaseTiming(Resourceful):
    name: str = Field(max_length=32, description="detect, save, commit, regroup, restart, …")
    ms: int = Field(description="How long it took, on the job's clock.")


class Incident(Resourceful):
    id: str = Field(max_length=128, description="Runs through every Event, log line and phase.")
    job_id: str | None = Field(
        default=None, max_length=128, description="The id that the job gave it, if it saw it first."
    )
    quarantine: str | None = Field(
        default=None,
        max_length=128,
        description="The incident of the verdict on the node, as its NodeQuarantine has it.",
    )
    cause: str = Field(max_length=64, description="One CamelCase word.")
    message: str = Field(default="", max_length=2048, description="What happened.")
    node: str | None = Field(default=None, max_length=253, description="Node concerned.")
    slot: int | None = Field(default=None, description="Slot concerned.")
    attempt: int | None = Field(
        default=None, description="Attempt of the slot that the incident ended."
    )
    rung: str | None = Field(default=None, max_length=32, description="How it was recovered.")
    started_at: str = Field(
        max_length=40,
        description="When it began.",
        json_schema_extra={"format": "date-time"},
    )
    resumed_step: int | None = Field(default=None, description="Step that the job went on from.")
    steps_lost: int | None = Field(default=None, description="Steps that had to be taken again.")
    marks: list[Mark] = Field(
        default_factory=list, max_length=16, description="When the operator saw which phase."
    )
    phases: list[PhaseTiming] = Field(
        default_factory=list, max_length=16, description="Durations that the job measured."
    )
    open: bool = Field(default=True, description="Whether it is still going on.")


class GangStatus(Resourceful):
    """Pods that were given back because not enough of them found a node."""

    tries: int = Field(description="How often in a row they were given back.")
    since: str = Field(
        max_length=40,
        description="Since when they are given back.",
        json_schema_extra={"format": "date-time"},
    )
    retry_at: str = Field(
        max_length=40,
        description="When pods are made again.",
        json_schema_extra={"format": "date-time"},
    )


class JobStatus(Resourceful):
    """What we see of the job; the run itself lives in the object store."""

    state: str | None = Field(
        default=None, max_length=32, description="One word derived from the conditions, for people."
    )
    message: str | None = Field(
        default=None, max_length=1024, description="Why it is in this state, in one sentence."
    )
    observed_generation: int | None = Field(
        default=None, description="Generation of the spec acted upon."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Running, Suspended, Complete, Failed, Recovering, CheckpointHealthy.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    world: WorldStatus | None = Field(default=None, description="How many train, how many should.")
    selector: str | None = Field(
        default=None,
        max_length=253,
        description="Label selector of the pods, for the scale subresource.",
    )
    run: str | None = Field(default=None, max_length=1300, description="Where the run lives.")
    epoch: int | None = Field(default=None, description="Membership of the running job, counted.")
    step: int | None = Field(
        default=None, description="Furthest step that every member has applied."
    )
    until: int | None = Field(default=None, description="Step at which the script will end.")
    loss: float | None = Field(default=None, description="Loss of that step.")
    checkpoint: CheckpointStatus | None = Field(
        default=None, description="The newest committed checkpoint."
    )
    restarts: Restarts | None = Field(default=None, description="Interruptions so far.")
    goodput: str | None = Field(
        default=None, max_length=16, description="Share of all worker seconds that went into steps."
    )
    started_at: str | None = Field(
        default=None,
        max_length=40,
        description="When the first epoch was seen running.",
        json_schema_extra={"format": "date-time"},
    )
    observed_at: str | None = Field(
        default=None,
        max_length=40,
        description="When these figures were written. While steps advance it stays young as long as an operator "
        "lives; of a job that waits or is over it is the time of the last change.",
        json_schema_extra={"format": "date-time"},
    )
    stopping_since: str | None = Field(
        default=None,
        max_length=40,
        description="Since when the job has been asked to stop.",
        json_schema_extra={"format": "date-time"},
    )
    suspended_seconds: int | None = Field(
        default=None,
        description="Time spent suspended; activeDeadlineSeconds does not count it.",
    )
    gang: GangStatus | None = Field(
        default=None,
        description="Set while the job waits for its turn after it gave its pods back.",
    )
    notes: list[str] = Field(
        default_factory=list, max_length=5, description="Findings that stopped nothing."
    )
    slots: list[SlotStatus] = Field(
        default_factory=list,
        max_length=4096,
        description="Attempts of the slots, written before the pod is made.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["slot"]},
    )
    incidents: list[Incident] = Field(
        default_factory=list, max_length=10, description="The last ten interruptions, newest last."
    )
