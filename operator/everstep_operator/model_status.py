"""The status of a `ResilientTrainingJob`. Output only, with two exceptions that are written before
the action they count: the attempts of the slots and the counters of restarts.
"""

from pydantic import Field

from everstep_operator.rules import ApiModel


class Condition(ApiModel):
    type: str = Field(max_length=316, description="Name of the condition.")
    status: str = Field(max_length=16, description="True, False or Unknown.")
    observed_generation: int = Field(
        default=0, description="Generation of the spec that this refers to."
    )
    last_transition_time: str = Field(
        max_length=40,
        description="When status last changed.",
        json_schema_extra={"format": "date-time"},
    )
    reason: str = Field(max_length=1024, description="One CamelCase word.")
    message: str = Field(max_length=32768, description="A sentence for users.")


class WorldStatus(ApiModel):
    ready: int = Field(
        default=0, description="Pods whose workers are members of the running epoch."
    )
    desired: int = Field(default=0, description="Pods wanted.")
    summary: str = Field(
        default="", max_length=32, description="ready/desired, for the printed column."
    )


class SparesStatus(ApiModel):
    """Pods that wait for the place of a lost one."""

    ready: int = Field(default=0, description="Pods that could train at once.")
    desired: int = Field(default=0, description="Pods wanted now.")
    slots: list[int] = Field(
        default_factory=list,
        max_length=64,
        description="The slots of the ready ones: they hold a node, and do not train.",
    )
    message: str | None = Field(
        default=None, max_length=1024, description="Why fewer than spares are wanted, or ready."
    )


class CheckpointStatus(ApiModel):
    step: int = Field(default=0, description="Step at which it was taken.")
    epoch: int = Field(default=0, description="Epoch that took it.")
    bytes: int = Field(default=0, description="Its size.", json_schema_extra={"format": "int64"})
    committed_at: str | None = Field(
        default=None,
        max_length=40,
        description="When it was committed, on the operator's clock; by an earlier job: when this job found it.",
        json_schema_extra={"format": "date-time"},
    )
    age_seconds: int = Field(default=0, description="Its age at observedAt.")


class PinnedStatus(ApiModel):
    name: str = Field(max_length=63, description="The name, as in checkpoint.pin.")
    step: int = Field(description="Step at which it was taken.")
    epoch: int = Field(description="Epoch that took it.")
    manifest: str = Field(max_length=1024, description="Its key in the run.")
    kept: bool = Field(
        default=True, description="False: the pin was removed, and the checkpoint may be deleted."
    )


class RecentRestarts(ApiModel):
    cause: str = Field(max_length=64, description="Their cause.")
    since: str = Field(
        max_length=40,
        description="Beginning of the part of the window in which they occurred.",
        json_schema_extra={"format": "date-time"},
    )
    count: int = Field(description="How many.")


class Restarts(ApiModel):
    total: int = Field(
        default=0, description="Interruptions of this job since it was created: the sum of byCause."
    )
    by_cause: dict[str, int] = Field(
        default_factory=dict,
        description="Interruptions by cause. One fault counts once, under the cause that explains it best: "
        "a rank that its GPU killed moves from WorkerDied to NodeGone once the node is judged.",
    )
    moved_by_cause: dict[str, int] = Field(
        default_factory=dict,
        description="Interruptions that were counted under this cause and then moved to another one.",
    )
    joined: int | None = Field(
        default=None,
        description="Interruptions that were counted and then found to be part of another one. total no longer has "
        "them; the metric, which must not fall, has.",
    )
    recent: list[RecentRestarts] = Field(
        default_factory=list,
        max_length=2048,
        description="Those that count against recovery.restartBudgets, by cause and part of the "
        "window.",
    )


class StartFailure(ApiModel):
    """A pod that did not start on a node. Counts for an hour."""

    node: str = Field(max_length=253, description="The node.")
    at: str = Field(
        max_length=40,
        description="When the start was given up.",
        json_schema_extra={"format": "date-time"},
    )
    reason: str = Field(max_length=64, description="The kubelet's reason, or Everstep's.")


class SlotStatus(ApiModel):
    """The record of one slot. The operator reads it back: do not edit it."""

    slot: int = Field(description="Number of the slot.")
    attempt: int = Field(description="Its current attempt: the pod <job>-<slot>-<attempt>.")
    pod_uid: str | None = Field(
        default=None, max_length=64, description="UID of that pod, once it has been seen."
    )
    node: str | None = Field(default=None, max_length=253, description="Node on which it runs.")
    cause: str | None = Field(default=None, max_length=64, description="Why this attempt was made.")
    former_node: str | None = Field(
        default=None, max_length=253, description="Node of the previous attempt."
    )
    leaving_since: str | None = Field(
        default=None,
        max_length=40,
        description="Since when it has been asked to leave.",
        json_schema_extra={"format": "date-time"},
    )
    incident: str | None = Field(
        default=None,
        max_length=128,
        description="The incident that moves it, until it trains again.",
    )
    start_failures: list[StartFailure] = Field(
        default_factory=list,
        max_length=8,
        description="Nodes on which its pods failed to start within the last hour.",
    )


class MovedSlot(ApiModel):
    slot: int = Field(description="Number of the slot.")
    attempt: int = Field(description="The attempt that the incident ended.")
    left: bool = Field(default=False, description="Whether it left with its state saved.")


class Mark(ApiModel):
    name: str = Field(
        max_length=32,
        description="signal, verdict, cordon, leave, commit, left, …; withdrawn: no slot had to leave any more.",
    )
    seconds: float = Field(description="Seconds since the incident began, on the operator's clock.")


class PhaseTiming(ApiModel):
    name: str = Field(max_length=32, description="detect, save, commit, regroup, restart, …")
    ms: int = Field(description="How long it took, on the job's clock.")


class Incident(ApiModel):
    id: str = Field(max_length=128, description="Id in every Event, log line and phase.")
    job_id: str | None = Field(
        default=None,
        max_length=128,
        description="The id from the job, if the job noticed it first.",
    )
    quarantine: str | None = Field(
        default=None,
        max_length=128,
        description="The incident of the verdict on the node, as in its NodeQuarantine.",
    )
    cause: str = Field(max_length=64, description="One CamelCase word.")
    message: str = Field(default="", max_length=2048, description="What happened.")
    node: str | None = Field(default=None, max_length=253, description="Node concerned.")
    slot: int | None = Field(default=None, description="The first slot concerned.")
    attempt: int | None = Field(
        default=None, description="Attempt of that slot that the incident ended."
    )
    slots: list[MovedSlot] = Field(
        default_factory=list,
        max_length=4096,
        description="All slots that it moves to other pods; empty: the job recovers in place.",
    )
    charged: str | None = Field(
        default=None,
        max_length=64,
        description="Cause under which restarts counts it; absent: another incident of the same "
        "fault is counted.",
    )
    rung: str | None = Field(
        default=None,
        max_length=32,
        description="How it was recovered. regroup: the other ranks "
        "continued in place; restart: all ranks restarted from a checkpoint; move: a planned move, nothing was lost.",
    )
    started_at: str = Field(
        max_length=40,
        description="When it began.",
        json_schema_extra={"format": "date-time"},
    )
    resumed_step: int | None = Field(default=None, description="Step from which the job continued.")
    steps_lost: int | None = Field(default=None, description="Steps that had to be repeated.")
    recovery_seconds: float | None = Field(
        default=None,
        description="Seconds without a step of any rank, once it is over and counted in "
        "recoveries; absent: not counted yet, or it interrupted nothing.",
    )
    marks: list[Mark] = Field(
        default_factory=list, max_length=16, description="When the operator observed each phase."
    )
    phases: list[PhaseTiming] = Field(
        default_factory=list, max_length=16, description="Durations that the job measured."
    )
    open: bool = Field(default=True, description="Whether it is still open.")


class RecoveryTotal(ApiModel):
    rung: str = Field(
        max_length=32,
        description="How they were recovered: regroup, restart, move, …; other: an unknown way.",
    )
    count: int = Field(default=0, description="Number of interruptions recovered in this way.")
    seconds: float = Field(
        default=0.0, description="Seconds without a step of any rank, over all of them."
    )
    steps_lost: int = Field(default=0, description="Steps that had to be repeated.")
    within: dict[str, int] = Field(
        default_factory=dict,
        max_length=32,
        description="Their number by duration. Key: a bound in seconds, as in the metric everstep_recovery_seconds. "
        "Each counts under the smallest bound that it did not exceed.",
    )


class GangStatus(ApiModel):
    """Pods that were given back because not enough of them found a node."""

    tries: int = Field(description="How often in a row they were given back.")
    since: str = Field(
        max_length=40,
        description="Since when they are given back.",
        json_schema_extra={"format": "date-time"},
    )
    retry_at: str = Field(
        max_length=40,
        description="When pods are created again.",
        json_schema_extra={"format": "date-time"},
    )


class JobStatus(ApiModel):
    """The observed state of the job; the run itself is in the object store."""

    state: str | None = Field(
        default=None, max_length=32, description="One word derived from the conditions."
    )
    message: str | None = Field(
        default=None, max_length=1024, description="Why it is in this state, in one sentence."
    )
    observed_generation: int | None = Field(
        default=None, description="Generation of the spec in effect."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Running, Suspended, Complete, Failed, Recovering, CheckpointHealthy; NodesHealthy once the job "
        "has stayed on a faulty node.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    world: WorldStatus | None = Field(
        default=None, description="Number of training and desired pods."
    )
    spares: SparesStatus | None = Field(
        default=None, description="Pods that wait for the place of a lost one, if any is wanted."
    )
    spare_seconds: int | None = Field(
        default=None,
        description="Seconds for which spares have held a node so far, added up over pods.",
        json_schema_extra={"format": "int64"},
    )
    selector: str | None = Field(
        default=None,
        max_length=253,
        description="Label selector of the pods, for the scale subresource.",
    )
    run: str | None = Field(default=None, max_length=1300, description="Where the run is stored.")
    epoch: int | None = Field(
        default=None,
        description="Number of the running membership epoch: it grows "
        "when ranks leave or join. It is not a pass over the data.",
    )
    step: int | None = Field(
        default=None, description="Furthest step that every member has applied."
    )
    until: int | None = Field(default=None, description="Step at which the script ends.")
    loss: float | None = Field(default=None, description="Loss of that step.")
    checkpoint: CheckpointStatus | None = Field(
        default=None, description="The newest committed checkpoint."
    )
    kept_step: int | None = Field(
        default=None,
        description="Newest step that the pods keep in memory, to which the job goes back if a loss leaves no whole "
        "copy of the model; absent: none.",
    )
    pinned: PinnedStatus | None = Field(
        default=None, description="The checkpoint of checkpoint.pin, once it is committed."
    )
    restarts: Restarts | None = Field(default=None, description="Interruptions so far.")
    recoveries: list[RecoveryTotal] = Field(
        default_factory=list,
        max_length=8,
        description="What the recoveries since the job was created have cost, by rung.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["rung"]},
    )
    goodput: str | None = Field(
        default=None, max_length=16, description="Share of all worker seconds spent in steps."
    )
    seconds: dict[str, float] = Field(
        default_factory=dict,
        max_length=16,
        description="The seconds of all workers so far, by what they were spent on: step, data, wait, "
        "stall, detect, regroup, restore, startup, evaluate, pause, idle.",
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
        description="When these figures were written. While steps advance it stays recent as "
        "long as an operator runs; for a job that waits or is over it is the time "
        "of the last change.",
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
        description="Time spent suspended; activeDeadlineSeconds does not include it.",
    )
    gang: GangStatus | None = Field(
        default=None,
        description="Set while the job waits for its turn after it gave its pods back.",
    )
    notes: list[str] = Field(
        default_factory=list, max_length=5, description="Findings that did not stop the job."
    )
    slots: list[SlotStatus] = Field(
        default_factory=list,
        max_length=4096,
        description="Attempts of the slots, written before the pod is created.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["slot"]},
    )
    incidents: list[Incident] = Field(
        default_factory=list,
        max_length=64,
        description="The last ten closed interruptions, those that a verdict on a node may still explain, and all open "
        "ones, newest last.",
    )
