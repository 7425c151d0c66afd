"""The resource `NodeQuarantine`: one incident on one node."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from everstep_contract import names
from everstep_operator.resource import Column, Resource
from everstep_operator.rules import Resourceful, Rule


class QuarantineEvidence(Resourceful):
    """One finding on one GPU: the same one while machine, GPU, kind, code and boot agree and it
    did not appear anew."""

    machine: str = Field(description="machine id of the node when it was found")
    gpu: str = Field(description="UUID of the GPU")
    kind: Literal["xid", "double-bit-ecc", "row-remap-failure", "gpu-missing"] = Field(
        description="what was found"
    )
    code: int = Field(0, description="the XID; 0 for other kinds")
    first_seen: datetime = Field(description="when the operator first saw it")
    boot: str = Field(
        "", description="boot id of the node; empty for a finding that outlives a reboot"
    )
    appeared: bool = Field(
        True,
        description="true: seen to appear; false: it stood there when the operator first looked",
    )


class NodeQuarantineSpec(Resourceful):
    """What was found on which node. Delete the object to release the node: the same evidence does
    not take it again."""

    node_name: str = Field(min_length=1, max_length=253, description="the node")
    machine: str = Field(
        "", description="machine id of the node; another machine of the same name is not affected"
    )
    incident: str = Field(
        max_length=63, description="identity of the incident in Events, log lines and job status"
    )
    verdict: Literal["Leaving", "Gone"] = Field(
        description=(
            "Leaving: jobs save, then leave the node. "
            "Gone: what runs there cannot be asked any more and is replaced"
        )
    )
    reason: str = Field(max_length=128, description="one word: why")
    message: str = Field(max_length=1024, description="a sentence with the evidence in it")
    cordon: bool = Field(
        True,
        description=(
            "the cordon budget admits this node, so it is cordoned and tainted; "
            "false: jobs leave it all the same"
        ),
    )
    gpu: str = Field("", max_length=128, description="UUID of the GPU of the first evidence")
    decided_at: datetime = Field(description="when the verdict fell")
    evidence: list[QuarantineEvidence] = Field(
        default_factory=list, max_length=16, description="the evidence"
    )


class NodeQuarantineStatus(Resourceful):
    """Where the quarantine stands; written by the operator alone."""

    state: Literal["Pending", "Quarantined", "OverBudget", "NodeAbsent", "NodeReplaced"] = Field(
        "Pending",
        description=(
            "Pending: to be cordoned. Quarantined: cordoned and tainted. OverBudget: not cordoned, "
            "the budget is spent. NodeAbsent: there is no such node. NodeReplaced: another machine "
            "bears the name, nothing is marked"
        ),
    )
    message: str = Field("", description="the same in a sentence, with what to do")
    cordoned: bool = Field(
        False, description="the node was schedulable before, so a release makes it so again"
    )
    cordoned_at: datetime | None = Field(None, description="when the node was marked")
    released_by: str = Field(
        "",
        description="what ended it, where the object itself was not deleted",
    )


RESOURCE = Resource(
    kind=names.QUARANTINE_KIND,
    plural=names.QUARANTINE_PLURAL,
    short_names=("nq",),
    scope="Cluster",
    description=(
        "One incident on one node: evidence, verdict and state. Delete it to release the node; "
        "the evidence in it then counts as answered and does not take the node again."
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
    ),
)
