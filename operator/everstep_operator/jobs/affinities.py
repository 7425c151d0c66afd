"""The terms that Everstep adds to a pod's affinity: where it may run, and where it prefers to run.
Pure.

The user's own terms are kept. The affinity of an existing pod cannot be changed.
"""

from collections.abc import Sequence
from typing import Any

from everstep_contract import names

Body = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
NODE_FIELD = "metadata.name"
NODE_HOST = "kubernetes.io/hostname"
NODE_NVLINK = "nvidia.com/gpu.clique"
"""Nodes with the same value of this label, which NVIDIA's GPU operator sets, reach each other over NVLink."""
NODE_ZONE = "topology.kubernetes.io/zone"
NEAR = {NODE_HOST: 100, NODE_NVLINK: 80, names.NODE_RACK: 60, NODE_ZONE: 40}
"""Weight with which each mate in the same domain attracts a pod. Each domain is inside the next
one, so the weights add up.
"""
APART = {names.NODE_RACK: 50, NODE_HOST: 50}
"""Weight with which each of the job's other pods repels a spare."""


def exclude_nodes(pod_spec: Body, nodes: Sequence[str]) -> None:
    """The template's terms are alternatives, so each of them must exclude the nodes. A matchField
    takes only one value.
    """
    if not nodes:
        return
    required = _part(pod_spec, "nodeAffinity").setdefault(REQUIRED, {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *_not_on(nodes)]}
        for term in terms
    ]


def shun_nodes(pod_spec: Body, nodes: Sequence[str]) -> None:
    """Only a preference: a suspicion may end while the pod is pending."""
    if nodes:
        wish = {"weight": 100, "preference": {"matchFields": _not_on(nodes)}}
        _prefer(pod_spec, "nodeAffinity", [wish])


def draw_to_mates(pod_spec: Body, job_uid: str, mates: Sequence[int]) -> None:
    """Only a preference: a pod that finds no room near its mates runs elsewhere."""
    if mates:
        pods = _pods_of(job_uid, "In", mates)
        _prefer(pod_spec, "podAffinity", [_weigh(w, pods, domain) for domain, w in NEAR.items()])


def keep_apart(pod_spec: Body, job_uid: str, mates: Sequence[int]) -> None:
    """A fault that takes the job's other pods away should not take the spare. The spare does not
    avoid its mates: it can train only together with them. Nor does it prefer another zone: once it
    trains there, it would slow down all other ranks.
    """
    pods = _pods_of(job_uid, "NotIn", mates)
    _prefer(pod_spec, "podAntiAffinity", [_weigh(w, pods, domain) for domain, w in APART.items()])


def _pods_of(job_uid: str, operator: str, slots: Sequence[int]) -> Body:
    """A selector for the job's pods by slot; without `slots`, for all of them."""
    found: Body = {"matchLabels": {names.LABEL_JOB_UID: job_uid}}
    if slots:
        values = [str(slot) for slot in slots]
        found["matchExpressions"] = [
            {"key": names.LABEL_SLOT, "operator": operator, "values": values}
        ]
    return found


def _weigh(weight: int, pods: Body, domain: str) -> Body:
    return {
        "weight": weight,
        "podAffinityTerm": {"labelSelector": pods, "topologyKey": domain},
    }


def _prefer(pod_spec: Body, kind: str, wishes: Sequence[Body]) -> None:
    part = _part(pod_spec, kind)
    part[PREFERRED] = [*(part.get(PREFERRED) or []), *wishes]


def _part(pod_spec: Body, kind: str) -> Body:
    affinity = pod_spec["affinity"] = pod_spec.get("affinity") or {}
    part: Body = affinity.get(kind) or {}
    affinity[kind] = part
    return part


def _not_on(nodes: Sequence[str]) -> list[Body]:
    return [{"key": NODE_FIELD, "operator": "NotIn", "values": [name]} for name in nodes]
