"""The resource `NodeQuarantine`: one incident on one node."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from everstep_contract import names
from everstep_operator.model_status import Condition
from everstep_operator.resource import Column, Resource
from everstep_operator.rules import ApiModel, Rule


class QuarantineEvidence(ApiModel):
    """One finding on one GPU: the same finding while machine, GPU, kind, code and boot agree and it
    has not appeared again.
    """

    machine: str = Field(
        description="the hardware's UUID (systemUUID of the node) when it was found; without one, the machine id"
    )
    gpu: str = Field(description="UUID of the GPU")
    kind: str = Field(
        max_length=63,
        pattern="^[a-z0-9]+(-[a-z0-9]+)*$",
        description="what was found: gpu-missing, or the kind of a rule (xid, double-bit-ecc, row-remap-failure, …)",
    )
    code: int = Field(
        0,
        description="distinguishes faults of one kind, as the XID does; 0: nothing to distinguish",
    )
    first_seen: datetime = Field(description="when the operator first saw it")
    boot: str = Field(
        "", description="boot id of the node; empty for a finding that survives a reboot"
    )
    appeared: bool = Field(
        True,
        description="true: seen to appear; false: present when the operator first looked",
    )


class NodeQuarantineSpec(ApiModel):
    """What was found on which node. Delete the object to release the node: the same evidence does
    not quarantine it again.
    """

    node_name: str = Field(min_length=1, max_length=253, description="the node")
    machine: str = Field(
        "",
        description="the hardware's UUID (systemUUID of the node); another machine of the same name is not affected",
    )
    incident: str = Field(
        max_length=63, description="id of the incident in Events, log lines and job status"
    )
    verdict: Literal["Leaving", "Gone"] = Field(
        description=(
            "Leaving: jobs save, then leave the node. Gone: pods on it no longer respond "
            "and are replaced"
        )
    )
    reason: str = Field(max_length=128, description="the reason, one CamelCase word")
    message: str = Field(max_length=1024, description="a sentence with the evidence")
    cordon: bool = Field(
        True,
        description=(
            "the cordon budget admits this node, so it is cordoned and tainted; "
            "false: beyond the budget, so it is only a suspicion: jobs stay, new pods prefer other nodes"
        ),
    )
    gpu: str = Field("", max_length=128, description="UUID of the GPU of the first evidence")
    decided_at: datetime = Field(description="when the verdict was made")
    evidence: list[QuarantineEvidence] = Field(
        default_factory=list, max_length=16, description="the evidence"
    )
    gone_pods: list[str] = Field(
        default_factory=list,
        max_length=64,
        description=(
            "with verdict Gone: namespace/name of the pods that held the lost GPUs; empty: the "
            "holders are unknown, and every pod of the node counts but those in sparedPods"
        ),
    )
    spared_pods: list[str] = Field(
        default_factory=list,
        max_length=64,
        description=(
            "with verdict Gone and no gonePods: namespace/name of the pods that hold a GPU which "
            "still works; they are asked to save before they are replaced"
        ),
    )
    put_back: str = Field(
        "",
        max_length=128,
        description=(
            "not empty: this object had been lost and the operator recreated it; the "
            "reason of the condition PutBack"
        ),
    )


class NodeQuarantineStatus(ApiModel):
    """The state of the quarantine; written only by the operator."""

    state: Literal["Pending", "Quarantined", "OverBudget", "NodeAbsent", "NodeReplaced"] = Field(
        "Pending",
        description=(
            "Pending: to be cordoned. Quarantined: cordoned and tainted. OverBudget: "
            "not cordoned, the budget is spent. NodeAbsent: there is no such node. NodeReplaced: "
            "another machine has the name, nothing is marked"
        ),
    )
    message: str = Field("", description="the same in a sentence, with what to do")
    cordoned: bool = Field(
        False, description="the node was schedulable before, so a release makes it so again"
    )
    cordoned_at: datetime | None = Field(None, description="when the node was marked")
    released_by: str = Field(
        "",
        description="what ended it, if the object itself was not deleted",
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=8,
        description="PutBack: the object had been lost and was recreated.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )


RESOURCE = Resource(
    kind=names.QUARANTINE_KIND,
    plural=names.QUARANTINE_PLURAL,
    short_names=("nq",),
    scope="Cluster",
    description=(
        "One incident on one node: evidence, verdict and state. Delete it to release "
        "the node; its evidence then counts as answered and does not quarantine the "
        "node again."
    ),
    spec_model=NodeQuarantineSpec,
    status_model=NodeQuarantineStatus,
    columns=(
        Column(name="Node", path=".spec.nodeName"),
        Column(name="Reason", path=".spec.reason"),
        Column(name="GPU", path=".spec.gpu"),
        Column(name="Verdict", path=".spec.verdict"),
        Column(name="State", path=".status.state"),
        Column(name="Incident", path=".spec.incident", priority=1),
        Column(name="Message", path=".spec.message", priority=1),
    ),
    cel=(
        Rule(
            cel="self.spec.nodeName == oldSelf.spec.nodeName",
            message="spec.nodeName cannot be changed: delete this object and create another",
        ),
        Rule(
            cel="self.spec.incident == oldSelf.spec.incident",
            message="spec.incident cannot be changed: it names this incident in Events and logs",
        ),
        Rule(
            cel="self.spec.cordon || !oldSelf.spec.cordon",
            message="spec.cordon cannot be changed from true to false: to release the node, delete this object",
        ),
    ),
)
