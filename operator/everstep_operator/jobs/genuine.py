"""Which pods are a job's own. Pure.

A pod counts only if all of these hold. Labels prove nothing: any user can write them.

1. It is in the job's namespace: a UID can be copied into a pod of any namespace.
2. Its controller ownerReference has the job's group, kind and UID.
3. It has the name that the operator computes for a slot and an attempt. Names cannot be changed
   and are unique, so there is at most one pod for each attempt.
4. The operator asked for that slot and attempt: either status recorded this pod's UID for it
   (only the operator writes status), or the pod carries the operator's proof.

Status alone cannot answer 4: after a lost status, or an etcd restored from a backup, attempts
are read from the pods (next attempt = 1 + the highest). So each pod carries its own proof: an
HMAC over job UID, slot and attempt, with a key that only the operator has. The job's token
would not do: every worker has it, and anyone who may create pods in the namespace can mount its
Secret. A copied proof is valid only for its own attempt, under a name that the real pod holds
as long as it exists; once status has recorded the real pod's UID, no other pod is accepted for
it.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep_contract import auth, names
from everstep_operator.world import Key, controller_of

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKeys:
    """Keys derived from the operator's key for one job."""

    token: str
    """Shared with the job's agents."""
    pod_key: bytes
    """Never leaves the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Slot and attempt, as in a pod's name."""

    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job, as its pods must name it."""

    namespace: str
    name: str
    uid: str
    keys: JobKeys
    recorded: Mapping[Place, str]
    """Pod UIDs that status has recorded."""


def derive_keys(operator_key: bytes, job_uid: str) -> JobKeys:
    pod_key = hmac.digest(operator_key, f"pods of {job_uid}".encode(), hashlib.sha256)
    return JobKeys(token=auth.derive_token(operator_key, job_uid), pod_key=pod_key)


def derive_proof(keys: JobKeys, slot: int, attempt: int) -> str:
    """For the annotation `names.ANNOTATION_PROOF` of that pod."""
    return hmac.digest(keys.pod_key, f"{slot}/{attempt}".encode(), hashlib.sha256).hex()


def build_owner(key: Key, uid: str, status: Object, keys: JobKeys) -> Owner:
    """`status` is the job's status from the API server; an unreadable one contains no recorded
    pods.
    """
    namespace, name = key
    slots = status.get("slots")
    recorded = _list_recorded(slots if isinstance(slots, list) else ())
    return Owner(namespace=namespace, name=name, uid=uid, keys=keys, recorded=recorded)


def _list_recorded(slots: Iterable[Any]) -> dict[Place, str]:
    records = [s for s in slots if isinstance(s, Mapping)]
    return {
        Place(slot=s["slot"], attempt=s["attempt"]): s["podUid"]
        for s in records
        if s.get("podUid") and "slot" in s and "attempt" in s
    }


def find_place(pod: Object, owner: Owner) -> Place | None:
    """Slot and attempt of a pod of this job; None for a pod that is not the job's."""
    metadata = pod["metadata"]
    if metadata.get("namespace") != owner.namespace or not _is_controlled(pod, owner.uid):
        return None
    place = parse_name(metadata["name"], owner.name)
    return place if place is not None and _is_asked_for(metadata, place, owner) else None


def _is_controlled(pod: Object, uid: str) -> bool:
    found = controller_of(pod)
    if found is None or found.get("uid") != uid or found.get("kind") != names.KIND:
        return False
    return str(found.get("apiVersion", "")).partition("/")[0] == names.GROUP


def _is_asked_for(metadata: Object, place: Place, owner: Owner) -> bool:
    recorded = owner.recorded.get(place)
    if recorded is not None:
        return bool(metadata["uid"] == recorded)
    shown = str((metadata.get("annotations") or {}).get(names.ANNOTATION_PROOF, ""))
    good = derive_proof(owner.keys, place.slot, place.attempt)
    return hmac.compare_digest(shown.encode(), good.encode())


def parse_name(name: str, job: str) -> Place | None:
    """The inverse of `names.pod_name`: None unless that function gives exactly this name."""
    slot, _, attempt = name.removeprefix(f"{job}-").partition("-")
    if not (slot.isdecimal() and attempt.isdecimal()):
        return None
    place = Place(slot=int(slot), attempt=int(attempt))
    return place if names.pod_name(job, place.slot, place.attempt) == name else None
