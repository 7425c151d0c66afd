"""What the CRD generator needs to know about a kind, declared next to the kind's model."""

from dataclasses import dataclass

from pydantic import BaseModel

from everstep_operator.rules import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of `kubectl get`; `priority` 1 shows it with `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    description: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    wanted: str
    actual: str
    selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """All that the generator needs to know about one kind."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    scope: str
    """Namespaced or Cluster."""
    description: str
    spec_model: type[BaseModel]
    status_model: type[BaseModel]
    columns: tuple[Column, ...]
    cel: tuple[Rule, ...] = ()
    """Rules on the whole object; those on parts are in the models' `rules`."""
    scale: Scale | None = None

    @property
    def categories(self) -> tuple[str, ...]:
        """`kubectl delete all --all` in one namespace also deletes cluster-scoped objects, in the whole cluster."""
        return ("all",) if self.scope == "Namespaced" else ()
