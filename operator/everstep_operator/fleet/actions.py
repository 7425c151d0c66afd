"""What a fleet plan consists of. An action with a reason is told as an Event once it is done."""

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
    """`quarantine` is as it shall be; its version is that of what was read."""

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
    """Nothing but an Event, about a node or ("") the operator at large; written once for the same
    words."""

    node: str
    reason: str
    message: str
    warning: bool = True


Action = CreateQuarantine | PatchSpec | PatchStatus | PatchNode | Tell
