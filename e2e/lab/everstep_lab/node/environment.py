"""Builds a container's environment as the kubelet does. Pure.

The values come from the pod and from the ConfigMaps and Secrets to which it refers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_lab.node.errors import ConfigError, NotSimulatedError

Object = Mapping[str, Any]
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The ConfigMaps and Secrets that the pod refers to: name → key → content."""

    config_maps: Mapping[str, Mapping[str, bytes]]
    secrets: Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the pod runs: values that the downward API needs."""

    node: str
    host_ip: str
    pod_ip: str


def build_env(container: Object, pod: Object, sources: Sources, place: Place) -> dict[str, str]:
    """The container's environment: `envFrom` first, then `env` in order.

    `$(NAME)` in a value is replaced by the value of an earlier variable.

    Raises:
        ConfigError: a required ConfigMap, Secret or key does not exist.
    """
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        env.update(_env_from(source, sources))
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _value_from(entry["valueFrom"], container, pod, sources, place)
        else:
            value = expand(entry.get("value", ""), env)
        if value is not None:
            env[entry["name"]] = value
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value and `$$` by a dollar. An unknown name stays as written."""

    def one(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return env.get(match.group(1), match.group())

    return _REFERENCE.sub(one, text)


def field_value(path: str, pod: Object, place: Place) -> str:
    """A downward API field. Raises `NotSimulatedError` if the lab does not support the field."""
    meta, spec = pod["metadata"], pod["spec"]
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return str((meta.get(keyed.group(1)) or {}).get(keyed.group(2), ""))
    values = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "metadata.labels": _lines(meta.get("labels")),
        "metadata.annotations": _lines(meta.get("annotations")),
        "spec.nodeName": place.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": place.host_ip,
        "status.hostIPs": place.host_ip,
        "status.podIP": place.pod_ip,
        "status.podIPs": place.pod_ip,
    }
    if path not in values:
        raise NotSimulatedError(f"the lab does not simulate the downward API field {path!r}")
    return str(values[path])


def resource_value(reference: Object, container: Object) -> str:
    """A value such as `limits.memory`, in units of the divisor, rounded up as the kubelet does."""
    kind, _, resource = reference["resource"].partition(".")
    amount = ((container.get("resources") or {}).get(kind) or {}).get(resource, "0")
    divisor = parse_quantity(str(reference.get("divisor") or "1")) or 1.0
    return str(int(-(-parse_quantity(str(amount)) // divisor)))


def parse_quantity(text: str) -> float:
    """Parse a Kubernetes quantity, such as `1500m`, `2Gi` or `3`. Raises `ValueError`."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?\d+)?)([A-Za-z]*)", text)
    if match is None or match.group(2) not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity; write for example 500m, 2 or 4Gi")
    return float(match.group(1)) * _SUFFIXES[match.group(2)]


def _lines(pairs: Mapping[str, str] | None) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted((pairs or {}).items()))


def _env_from(source: Object, sources: Sources) -> dict[str, str]:
    prefix = source.get("prefix", "")
    for field, kind, known in _kinds(sources):
        if field + "Ref" in source:
            reference = source[field + "Ref"]
            if reference["name"] in known:
                found = known[reference["name"]]
                return {prefix + key: value.decode() for key, value in found.items()}
            if reference.get("optional"):
                return {}
            raise ConfigError(f'{kind} "{reference["name"]}" not found')
    return {}


def _value_from(
    value: Object, container: Object, pod: Object, sources: Sources, place: Place
) -> str | None:
    if "fieldRef" in value:
        return field_value(value["fieldRef"]["fieldPath"], pod, place)
    if "resourceFieldRef" in value:
        return resource_value(value["resourceFieldRef"], container)
    for field, kind, known in _kinds(sources):
        if field + "KeyRef" in value:
            return _key(value[field + "KeyRef"], kind, known, pod["metadata"]["namespace"])
    raise NotSimulatedError(f"the lab does not simulate env valueFrom {sorted(value)}")


def _key(
    reference: Object, kind: str, known: Mapping[str, Mapping[str, bytes]], namespace: str
) -> str | None:
    name, key = reference["name"], reference["key"]
    if name in known and key in known[name]:
        return known[name][key].decode()
    if reference.get("optional"):
        return None
    if name not in known:
        raise ConfigError(f'{kind} "{name}" not found')
    raise ConfigError(f"couldn't find key {key} in {kind} {namespace}/{name}")


def _kinds(sources: Sources) -> tuple[tuple[str, str, Mapping[str, Mapping[str, bytes]]], ...]:
    return (
        ("configMap", "configmap", sources.config_maps),
        ("secret", "secret", sources.secrets),
    )
