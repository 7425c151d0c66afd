"""The actions of a fleet plan. An action with a reason is reported as an Event once it is done."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateQuarantine:
    quarantine: Quarantine
    reason: str
    message: str
    warning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """`quarantine`: the desired object; its version is the one that was read."""

    quarantine: Quarantine
    reason: str = ""
    message: str = ""
    warning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    quarantine: Quarantine
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchNode:
    node: NodeFacts
    body: Mapping[str, Any]
    reason: str = ""
    message: str = ""
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Only an Event, about a node or ("") the operator itself. While the plans contain the same one, it
    is written again every `apply.REPEAT_SECONDS`.
    """

    node: str
    reason: str
    message: str
    warning: bool = True


Action = CreateQuarantine | PatchSpec | PatchStatus | PatchNode | Tell

ActionKey = tuple[str, str]
"""Kind of an action, and the name of its object."""


def key_of(action: Action) -> ActionKey:
    match action:
        case PatchNode(node=node):
            name = node.name
        case Tell(node=node_name):
            name = node_name
        case _:
            name = action.quarantine.name
    return type(action).__name__, name
