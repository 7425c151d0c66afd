"""What Pod Security "restricted" requires beyond running as non-root. Pure.

Whether an image runs as root is its owner's decision. A container whose template says non-root
gets the other settings where they are unset, because without root they remove nothing. A
template that does not say so is left unchanged, and no setting of the user is changed.
"""

from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]
UNCONFINED_CAPABILITIES = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN"})
"""With these, or privileged, the API server rejects allowPrivilegeEscalation: false."""


def add_restrictions(pod_spec: Body) -> None:
    """`runAsNonRoot: true`, or a runAsUser other than 0, at the pod or the container is enough."""
    pod: Mapping[str, Any] = pod_spec.get("securityContext") or {}
    for kind in ("initContainers", "containers"):
        for container in pod_spec.get(kind) or ():
            own: Body = dict(container.get("securityContext") or {})
            if _runs_without_root(pod, own):
                container["securityContext"] = {**_restrictions(pod, own), **own}


def _runs_without_root(pod: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    user = own.get("runAsUser", pod.get("runAsUser"))
    declared = own.get("runAsNonRoot", pod.get("runAsNonRoot"))
    return declared is True if user is None else user != 0 and declared is not False


def _restrictions(pod: Mapping[str, Any], own: Mapping[str, Any]) -> Body:
    found: Body = {}
    if "runAsNonRoot" not in pod:
        found["runAsNonRoot"] = True
    if "seccompProfile" not in pod:
        found["seccompProfile"] = {"type": "RuntimeDefault"}
    if "capabilities" not in own:
        found["capabilities"] = {"drop": ["ALL"]}
    if not own.get("privileged") and not _added(own) & UNCONFINED_CAPABILITIES:
        found["allowPrivilegeEscalation"] = False
    return found


def _added(own: Mapping[str, Any]) -> frozenset[str]:
    return frozenset((own.get("capabilities") or {}).get("add") or ())
