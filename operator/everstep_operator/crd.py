"""CustomResourceDefinitions from the pydantic models: `python -m everstep_operator.crd [--check]`
writes `crds/*.yaml`, and the same files into the chart, which cannot read files outside its folder.

Structural schemas have no `$ref`, null types or titles, so references are inlined and optional
fields lose their null. Everything else in the models (bounds, enums, defaults, descriptions,
rules) is copied.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from everstep_contract import names
from everstep_operator import model
from everstep_operator.fleet import model as fleet_model
from everstep_operator.resource import Column, Resource
from everstep_operator.rules import ApiModel, Rule

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (REPOSITORY / "crds", REPOSITORY / "charts" / "everstep" / "files" / "crds")
CLIENT_SIDE_APPLY_LIMIT = 262_144
"""Limit of the annotation that `kubectl apply` writes; a larger CRD needs server-side apply."""


def resources() -> tuple[Resource, ...]:
    """Every kind that Everstep defines."""
    return (model.RESOURCE, fleet_model.RESOURCE)


def build_crd(resource: Resource) -> dict[str, Any]:
    columns = [_column(c) for c in resource.columns]
    columns.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    version: dict[str, Any] = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root(resource)},
        "subresources": _subresources(resource),
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": resource.scope,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": list(resource.short_names),
                "categories": list(resource.categories),
            },
            "versions": [version],
        },
    }


def _column(column: Column) -> dict[str, Any]:
    body: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    if column.description:
        body["description"] = column.description
    if column.priority:
        body["priority"] = column.priority
    return body


def _subresources(resource: Resource) -> dict[str, Any]:
    body: dict[str, Any] = {"status": {}}
    if resource.scale:
        body["scale"] = {
            "specReplicasPath": resource.scale.wanted,
            "statusReplicasPath": resource.scale.actual,
            "labelSelectorPath": resource.scale.selector,
        }
    return body


def _root(resource: Resource) -> dict[str, Any]:
    root: dict[str, Any] = {
        "type": "object",
        "description": resource.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # Without a limit on the name's length, the API server counts the cost of rules that
            # use the name as unbounded.
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 253}},
            },
            "spec": describe_defaults(build_schema(resource.spec_model)),
            "status": build_schema(resource.status_model),
        },
    }
    if resource.cel:
        root["x-kubernetes-validations"] = [_cel(rule) for rule in resource.cel]
    return root


def build_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of a model."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    definitions = document.pop("$defs", {})
    rules = {cls.__name__: cls.rules for cls in _models()}
    schema = _structural(document, definitions, rules, model.__name__)
    assert isinstance(schema, dict)
    return schema


def _models() -> list[type[ApiModel]]:
    """`ApiModel` and all its subclasses. Their names are unique in this project."""
    found: list[type[ApiModel]] = []
    todo: list[type[ApiModel]] = [ApiModel]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return found


_DROPPED = frozenset({"title", "additionalProperties", "const"})


def _structural(
    node: Any, definitions: dict[str, Any], rules: dict[str, tuple[Rule, ...]], name: str = ""
) -> Any:
    if isinstance(node, list):
        return [_structural(item, definitions, rules) for item in node]
    if not isinstance(node, dict):
        return node
    node = _without_null(node)
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[-1]
        node = {**definitions[name], **{k: v for k, v in node.items() if k != "$ref"}}
    schema: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            schema[key] = {k: _structural(v, definitions, rules) for k, v in value.items()}
        elif key == "additionalProperties" and isinstance(value, dict):
            schema[key] = _structural(value, definitions, rules)
        elif key in ("default", "enum", "required", "x-kubernetes-validations"):
            schema[key] = value
        elif key not in _DROPPED:
            schema[key] = _structural(value, definitions, rules)
    if "exclusiveMinimum" in schema:
        schema["minimum"] = schema.pop("exclusiveMinimum")
        schema["exclusiveMinimum"] = True
    if rules.get(name):
        schema["x-kubernetes-validations"] = [_cel(rule) for rule in rules[name]]
    return schema


def describe_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults to the descriptions, because `kubectl explain` does not show them."""
    if "properties" in schema:
        told = {k: describe_defaults(v) for k, v in schema["properties"].items()}
        return {**schema, "properties": told}
    default, text = schema.get("default"), schema.get("description")
    if default in (None, "") or isinstance(default, dict | list) or not text:
        return schema
    shown = str(default).lower() if isinstance(default, bool) else default
    return {**schema, "description": f"{text.rstrip('.')}. Default: {shown}."}


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    """`X | None` becomes X: an absent field needs no null type."""
    options = node.get("anyOf")
    if not options:
        return node
    kept = [option for option in options if option.get("type") != "null"]
    if len(kept) != 1:
        raise ValueError(f"a structural schema cannot say {options}")
    rest = {k: v for k, v in node.items() if k != "anyOf" and not (k == "default" and v is None)}
    return {**kept[0], **rest}


def _cel(rule: Rule) -> dict[str, Any]:
    body = {"rule": rule.cel, "message": rule.message}
    if rule.found:
        body["messageExpression"] = rule.found
    if rule.at:
        body["fieldPath"] = rule.at
    return body


class _Dumper(yaml.SafeDumper):
    """Indents lists and writes no anchors, so that the files are easy to read."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def build_text(resource: Resource) -> str:
    head = (
        "# Generated by `make crds` from the models in operator/everstep_operator; do not edit.\n"
    )
    return head + yaml.dump(
        build_crd(resource), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m everstep_operator.crd", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if a file is out of date"
    )
    arguments = parser.parse_args(argv)
    stale = find_stale()
    shown = ", ".join(str(path.relative_to(REPOSITORY)) for path in stale)
    if stale and arguments.check:
        print(f"out of date: {shown}; run `make crds` and commit the result", file=sys.stderr)
        return 1
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"wrote {shown}" if stale else "all up to date")
    return 0


def find_stale() -> dict[Path, str]:
    """Files that differ from the models, and their expected content."""
    wanted = {
        folder / f"{resource.plural}.yaml": build_text(resource)
        for resource in resources()
        for folder in FOLDERS
    }
    return {p: t for p, t in wanted.items() if not p.exists() or p.read_text() != t}


if __name__ == "__main__":
    sys.exit(main())
