"""How a job's ranks form units, as users write it, and the rules that sizes obey because of it."""

from collections.abc import Callable
from typing import Any

from pydantic import Field

from everstep_contract.units import Mesh
from everstep_operator.rules import Rule, UserInput

MOST_OF_A_DIMENSION = 4096
UNIT = "self.parallelism.shard * self.parallelism.tensor"
RANKS = "self.workers.processesPerWorker"
TOGETHER = f"({UNIT} / {RANKS})"
"""Pods that hold a unit, where it takes more than one."""


def _refuse(name: str) -> Rule:
    return Rule(
        at=f".{name}",
        cel=f"!has(self.{name})",
        check=lambda parallelism: getattr(parallelism, name) is None,
        message=f"{name}: not yet supported, because Everstep divides a model only by shard and tensor: "
        f"leave {name} out",
    )


def _fix(name: str) -> Rule:
    return Rule(
        at=f".{name}",
        cel=f"self.{name} == oldSelf.{name}",
        message=f"parallelism.{name} cannot change, because pods created before and after the edit would hold other "
        "parts of the model: create a new job, with checkpoint.run set to this job's run to continue it",
    )


class Parallelism(UserInput):
    """How ranks divide the model. `shard` × `tensor` ranks are a unit, which holds one whole copy of it."""

    rules = (_refuse("pipeline"), _refuse("context"), _fix("shard"), _fix("tensor"))
    shard: int = Field(
        default=1,
        ge=1,
        le=MOST_OF_A_DIMENSION,
        description="Ranks over which each parameter is sharded (FSDP2). They compute different micro-batches.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        le=MOST_OF_A_DIMENSION,
        description="Ranks that divide the computation of each layer. They compute the same micro-batches.",
    )
    pipeline: int | None = Field(
        default=None, ge=1, le=4096, description="Not yet supported: leave it out."
    )
    context: int | None = Field(
        default=None, ge=1, le=4096, description="Not yet supported: leave it out."
    )

    @property
    def mesh(self) -> Mesh:
        return Mesh(shard=self.shard, tensor=self.tensor)


def _whole(name: str, size: Callable[[Any], int | None], *, optional: bool = False) -> Rule:
    """A number of pods is one of whole units. How units lie on pods has a rule of its own."""
    path = f"self.workers.{name}"
    absent = f"!has({path}) || " if optional else ""

    def check(spec: Any) -> bool:
        ranks, mesh = spec.workers.processes_per_worker, spec.parallelism.mesh
        split = bool(mesh.why_not_slots(ranks))
        return split or (size(spec.workers) or 0) % mesh.count_slots(ranks) == 0

    return Rule(
        at=f".workers.{name}",
        cel=f"{absent}({UNIT}) % {RANKS} != 0 || {path} % {TOGETHER} == 0",
        check=check,
        message=f"workers.{name} × processesPerWorker must be a whole number of units of parallelism.shard × "
        f"tensor ranks: change {name} or parallelism",
        found=f"'{name} is %d, but a unit of %d ranks (parallelism) takes %d pods (processesPerWorker %d): use a "
        f"multiple of %d'.format([{path}, {UNIT}, {TOGETHER}, {RANKS}, {TOGETHER}])",
    )


RULES = (
    Rule(
        at=".parallelism",
        cel=f"({UNIT}) % {RANKS} == 0 || {RANKS} % ({UNIT}) == 0",
        check=lambda spec: (
            not spec.parallelism.mesh.why_not_slots(spec.workers.processes_per_worker)
        ),
        message="a unit of parallelism.shard × tensor ranks and a pod of workers.processesPerWorker ranks: one must be "
        "a multiple of the other; change one of them",
        found="'a unit of parallelism has %d ranks and a pod %d (processesPerWorker): one must be a multiple of the "
        f"other; change one of them'.format([{UNIT}, {RANKS}])",
    ),
    _whole("replicas", lambda workers: workers.replicas),
    _whole("minReplicas", lambda workers: workers.min_replicas, optional=True),
    _whole("spares", lambda workers: workers.spares),
)
"""Of the whole spec."""
