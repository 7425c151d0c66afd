"""Nodes that a pod spec excludes by name."""

from collections.abc import Mapping
from typing import Any


def avoided_by(pod_spec: Mapping[str, Any]) -> frozenset[str]:
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or ()
    fields = [f for t in terms for f in t.get("matchFields") or ()]
    values = [f.get("values") or () for f in fields if f.get("operator") == "NotIn"]
    return frozenset(name for some in values for name in some)
