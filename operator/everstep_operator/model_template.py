"""The template of the worker pods, as far as the operator reads it: these fields have types, so that
building a pod meets none that it cannot read. All other fields are the API server's to judge, by a dry run.
"""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from everstep_contract import names
from everstep_operator.rules import Rule, Wanted

Quantity = Annotated[int | str, WithJsonSchema({"x-kubernetes-int-or-string": True})]
Words = dict[str, str]


def _require_64_bits(value: int) -> int:
    """The API server reads a larger number as no integer."""
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"is {value}: give a whole number of at most 64 bits")
    return value


Integer = Annotated[int, AfterValidator(_require_64_bits)]


class Loose(Wanted):
    """A part of which other fields are kept as they are."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )


class Toleration(Loose):
    key: str | None = Field(
        default=None, max_length=316, description="Taint key that is tolerated."
    )


class EnvVar(Loose):
    name: str | None = Field(default=None, description="Not EVERSTEP_…: these are Everstep's own.")


class VolumeMount(Loose):
    mount_path: str | None = Field(default=None, description="Where it is mounted.")


class ContainerPort(Loose):
    name: str | None = Field(default=None, description="Name of the port.")
    container_port: Integer | None = Field(
        default=None, description="Not 7070: that is the agent's."
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
    privileged: bool | None = Field(default=None, description="Whether it has all rights.")
    capabilities: Capabilities | None = Field(default=None, description="Added and dropped ones.")


class Container(Loose):
    name: str | None = Field(default=None, description="`trainer` for the one that trains.")
    env: list[EnvVar] | None = Field(default=None, description="Its environment.")
    ports: list[ContainerPort] | None = Field(default=None, description="Its ports.")
    volume_mounts: list[VolumeMount] | None = Field(default=None, description="Its volumes.")
    resources: Resources | None = Field(default=None, description="What it needs.")
    security_context: SecurityContext | None = Field(
        default=None, description="What its processes may do."
    )


class Volume(Loose):
    name: str | None = Field(default=None, description="Name of the volume.")


class Requirement(Loose):
    """Of a node."""


class NodeSelectorTerm(Loose):
    match_fields: list[Requirement] | None = Field(
        default=None, description="Nodes in question are added here."
    )


class NodeSelector(Loose):
    node_selector_terms: list[NodeSelectorTerm] | None = Field(
        default=None, description="Alternatives."
    )


class NodeAffinity(Loose):
    required: NodeSelector | None = Field(
        default=None,
        alias="requiredDuringSchedulingIgnoredDuringExecution",
        description="Nodes that will do.",
    )
    preferred: list[Requirement] | None = Field(
        default=None,
        alias="preferredDuringSchedulingIgnoredDuringExecution",
        description="Nodes that are preferred.",
    )


class Affinity(Loose):
    node_affinity: NodeAffinity | None = Field(default=None, description="To nodes.")


class PodSpec(Loose):
    """Spec of the pods, as in a Deployment."""

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
    containers: list[Container] | None = Field(
        default=None, description="The one named `trainer`, or the only one, trains."
    )
    init_containers: list[Container] | None = Field(
        default=None, description="Containers that run before."
    )
    volumes: list[Volume] | None = Field(default=None, description="Volumes of the pod.")
    affinity: Affinity | None = Field(
        default=None, description="Where the pods may run. Nodes in question are added."
    )
    security_context: SecurityContext | None = Field(
        default=None, description="What the pod's processes may do."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2_147_483_647,
        description="Time to save when a pod is asked to end; default 60.",
    )


class Metadata(Loose):
    """Labels and annotations of the pods."""

    labels: Words | None = Field(default=None, description="Labels; Everstep adds its own.")
    annotations: Words | None = Field(default=None, description="Annotations; Everstep adds two.")


class PodTemplate(Loose):
    """metadata (labels, annotations) and spec of the worker pods, as in a Deployment."""

    metadata: Metadata | None = Field(default=None, description="Labels and annotations.")
    spec: PodSpec = Field(
        description="Pod spec with your own image and `command: [everstep, run, train.py]` in the "
        "container named `trainer` (or the only one). Everstep adds to it: environment EVERSTEP_*, "
        "labels, one port, a memory volume whose size is added to the memory limit, a memory-backed "
        "/dev/shm, affinity away from quarantined nodes, annotations that keep autoscalers away; "
        "restartPolicy becomes OnFailure. With securityContext.runAsNonRoot: true it also gets the "
        "rest of Pod Security `restricted`, where unset.",
    )
