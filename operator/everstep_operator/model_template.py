"""The part of the pod template that the operator reads. These fields have types, so that building a
pod meets no unreadable value. The API server validates all other fields, in a dry run.
"""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from everstep_contract import names
from everstep_operator.rules import Rule, UserInput

Quantity = Annotated[int | str, WithJsonSchema({"x-kubernetes-int-or-string": True})]
Words = dict[str, str]


def _require_64_bits(value: int) -> int:
    """The API server rejects a larger number as no integer."""
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"is {value}: give a whole number of at most 64 bits")
    return value


Integer = Annotated[int, AfterValidator(_require_64_bits)]


class Loose(UserInput):
    """A part whose other fields are kept unchanged."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )


class Toleration(Loose):
    key: str | None = Field(
        default=None, max_length=316, description="Taint key that is tolerated."
    )


class EnvVar(Loose):
    name: str | None = Field(
        default=None,
        description="Not EVERSTEP_…: these names are reserved for Everstep, except for EVERSTEP_GROUP_FORMING.",
    )


class VolumeMount(Loose):
    mount_path: str | None = Field(default=None, description="Where it is mounted.")


class ContainerPort(Loose):
    name: str | None = Field(default=None, description="Name of the port.")
    container_port: Integer | None = Field(
        default=None, description="Not 7070: the agent uses that port."
    )


class Resources(Loose):
    limits: dict[str, Quantity] | None = Field(
        default=None, description="To memory, checkpoint.stagingMemory is added."
    )
    requests: dict[str, Quantity] | None = Field(
        default=None, description="To memory, checkpoint.stagingMemory is added."
    )


class Capabilities(Loose):
    add: list[str] | None = Field(default=None, description="Capabilities beyond the usual ones.")


class SecurityContext(Loose):
    run_as_user: Integer | None = Field(default=None, description="UID of the first process.")
    run_as_non_root: bool | None = Field(
        default=None,
        description="True: the rest of Pod Security `restricted` is added, where unset.",
    )
    privileged: bool | None = Field(default=None, description="Whether it is privileged.")
    capabilities: Capabilities | None = Field(default=None, description="Added and dropped ones.")


class Container(Loose):
    name: str | None = Field(default=None, description="`trainer` for the training container.")
    env: list[EnvVar] | None = Field(default=None, description="Its environment.")
    ports: list[ContainerPort] | None = Field(default=None, description="Its ports.")
    volume_mounts: list[VolumeMount] | None = Field(default=None, description="Its volumes.")
    resources: Resources | None = Field(default=None, description="Resource requests and limits.")
    security_context: SecurityContext | None = Field(
        default=None, description="What its processes may do."
    )


class Volume(Loose):
    name: str | None = Field(default=None, description="Name of the volume.")


class Requirement(Loose):
    """A requirement on a node's labels or fields."""


class NodeSelectorTerm(Loose):
    match_fields: list[Requirement] | None = Field(
        default=None,
        description="Everstep adds the nodes that the pod must not use: faulty and silent ones.",
    )


class NodeSelector(Loose):
    node_selector_terms: list[NodeSelectorTerm] | None = Field(
        default=None, description="Alternatives."
    )


class NodeAffinity(Loose):
    required: NodeSelector | None = Field(
        default=None,
        alias="requiredDuringSchedulingIgnoredDuringExecution",
        description="Required terms.",
    )
    preferred: list[Requirement] | None = Field(
        default=None,
        alias="preferredDuringSchedulingIgnoredDuringExecution",
        description="Preferred terms. Everstep adds suspect nodes, which the pod uses only if it finds no other.",
    )


class PodPreference(Loose):
    """A preference with regard to pods that run already, and its weight."""


class PodAffinity(Loose):
    preferred: list[PodPreference] | None = Field(
        default=None,
        alias="preferredDuringSchedulingIgnoredDuringExecution",
        description="Preferred terms. Pods of one unit get terms that keep them close together; spares get others.",
    )


class Affinity(Loose):
    node_affinity: NodeAffinity | None = Field(default=None, description="To nodes.")
    pod_affinity: PodAffinity | None = Field(default=None, description="To other pods.")
    pod_anti_affinity: PodAffinity | None = Field(default=None, description="Away from other pods.")


class PodSpec(Loose):
    """Spec of the pods, as in a Deployment."""

    rules = (
        Rule(
            at=".nodeName",
            cel="!has(self.nodeName)",
            check=lambda s: s.node_name is None,
            message="nodeName binds every pod to one node, so none can move when it fails: remove "
            "it, use nodeSelector or affinity",
        ),
        Rule(
            at=".tolerations",
            cel="!has(self.tolerations) || self.tolerations.all(t, has(t.key) && "
            f"t.key != '' && t.key != '{names.TAINT_QUARANTINE}')",
            check=lambda s: all(
                t.key and t.key != names.TAINT_QUARANTINE for t in s.tolerations or ()
            ),
            message=f"tolerations: one tolerates the taint {names.TAINT_QUARANTINE} (or has no "
            "key, which tolerates every taint), so pods would return to a failed node: "
            "remove it, or name the keys that you mean",
        ),
    )
    node_name: str | None = Field(
        default=None,
        max_length=253,
        description="Not allowed: it binds every pod to one node, so none can move when it fails. "
        "Use nodeSelector or affinity.",
    )
    tolerations: list[Toleration] | None = Field(
        default=None,
        max_length=64,
        description="Taints that the pods tolerate; each names its key.",
    )
    containers: list[Container] | None = Field(
        default=None, description="The one named `trainer`, or the only one, runs the training."
    )
    init_containers: list[Container] | None = Field(
        default=None, description="Containers that run before it."
    )
    volumes: list[Volume] | None = Field(default=None, description="Volumes of the pod.")
    affinity: Affinity | None = Field(
        default=None,
        description="Where the pods may run. Everstep adds terms that exclude faulty nodes, avoid suspect ones, "
        "keep a unit together and spares apart.",
    )
    security_context: SecurityContext | None = Field(
        default=None, description="Security settings of the pod's processes."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2_147_483_647,
        description="Time to save when a pod receives SIGTERM; default 60.",
    )


class Metadata(Loose):
    """Labels and annotations of the pods."""

    labels: Words | None = Field(default=None, description="Labels; Everstep adds its own.")
    annotations: Words | None = Field(
        default=None, description="Annotations; Everstep adds its own."
    )


class PodTemplate(Loose):
    """metadata (labels, annotations) and spec of the worker pods, as in a Deployment."""

    metadata: Metadata | None = Field(default=None, description="Labels and annotations.")
    spec: PodSpec = Field(
        description="Pod spec with your own image and `command: [everstep, run, train.py]` in the "
        "container named `trainer` (or the only one). Everstep adds to it: environment EVERSTEP_*, "
        "labels, one port, a memory volume whose size is added to the memory limit, a memory-backed "
        "/dev/shm, affinity away from faulty nodes and to the other pods of its unit, annotations "
        "that keep autoscalers away and prove that the pod is the job's; "
        "restartPolicy becomes OnFailure. With securityContext.runAsNonRoot: true it also gets the "
        "rest of Pod Security `restricted`, where unset.",
    )
