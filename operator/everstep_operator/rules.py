"""One declaration per validation rule, used by the pydantic validator and by the CEL in the CRD.

A test compares the two, and the live test runs them on a real API server.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`check` gets the model instance, `cel` the same object as `self`; both return whether it is
    valid.
    """

    cel: str
    message: str
    """Names the field, and the fix."""
    found: str = ""
    """CEL expression of type string that also names the value found; empty: `message` alone."""
    at: str = ""
    """Field that the message is about, like `.uri`; it becomes part of the path that the API server
    shows.
    """
    check: Callable[[Any], bool] | None = None
    """None for rules that only the API server can check (a change of an immutable field)."""


class ApiModel(BaseModel):
    """Base of all parts of Everstep's resources: camelCase in the API, rules checked after the
    fields.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        for rule in self.rules:
            if rule.check is not None and not rule.check(self):
                raise ValueError(rule.message)
        return self


class UserInput(ApiModel):
    """Base of what users write: a value of another type is rejected, as by the API server."""

    model_config = ConfigDict(strict=True)
