"""The worker pod: the user's template plus Everstep's additions. Pure: template in, body out.

The additions, and nothing else: labels, owner, environment, one port, the memory volume with
its size added to the memory limit, /dev/shm in memory, affinity (`affinities`), restartPolicy
OnFailure, no Kubernetes credentials; annotations that keep autoscalers from moving a training
pod; the rest of Pod Security "restricted" if the template says non-root.
"""

import copy
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep_contract import names
from everstep_contract.env import FOR_USERS, PREFIX, AgentEnv
from everstep_contract.pod_security import add_restrictions
from everstep_operator.jobs import affinities
from everstep_operator.jobs.observed import Job
from everstep_operator.model import JobSpec

Body = dict[str, Any]
SHM_PATH = "/dev/shm"
SHM_VOLUME = "everstep-shm"
GRACE_SECONDS = 60
"""terminationGracePeriodSeconds if the template has none: time to save on SIGTERM."""
LONGEST_MARGIN = 5.0
"""How many seconds of the grace period are left to the kubelet and to the container's end; at most
a tenth of it.
"""
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Keep autoscalers from removing the node; the template's own values take precedence."""
_FACTORS = {
    "": 1, "n": 1e-9, "u": 1e-6, "m": 0.001,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


def secret_name(job_name: str, uid: str) -> str:
    """Contains the UID, so an existing Secret of that name can only be the operator's. The operator
    may not read it.
    """
    return f"{job_name}-everstep-{uid[:8]}"


def build_secret(job: Job, token: str) -> Body:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": _job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token},
    }


def owner_reference(job: Job) -> Body:
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def _job_labels(job: Job) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "everstep-worker",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "everstep-operator",
        names.LABEL_JOB: job.name,
        names.LABEL_JOB_UID: job.uid,
    }


def with_proof(pod: Body, proof: str) -> Body:
    """See `genuine`."""
    metadata = pod["metadata"]
    annotations = {**metadata["annotations"], names.ANNOTATION_PROOF: proof}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}


def build_selector(job_name: str) -> str:
    return f"{names.LABEL_JOB}={job_name}"


def find_conflict(template: Mapping[str, Any]) -> str:
    """Describe a conflict between the template and Everstep's additions; empty if there is none."""
    spec = template.get("spec") or {}
    containers = spec.get("containers") or []
    if not containers:
        return "workers.template.spec.containers is empty: add the container that trains"
    trainer = find_trainer(containers)
    if trainer is None:
        found = ", ".join(str(c.get("name")) for c in containers)
        return (
            f"workers.template has {len(containers)} containers ({found}) and none is named "
            f"`{names.TRAINER_CONTAINER}`: give that name to the one that trains"
        )
    return _conflict_of_names(spec, trainer)


def _conflict_of_names(spec: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    for variable in trainer.get("env") or ():
        name = str(variable.get("name", ""))
        if name.startswith(PREFIX) and name not in FOR_USERS:
            return f"env {name}: names that begin with {PREFIX} are Everstep's; rename yours"
    for volume in spec.get("volumes") or ():
        if volume.get("name") in (names.MEMORY_VOLUME, SHM_VOLUME):
            return f"volume {volume['name']}: Everstep adds a volume of that name; rename yours"
    for mount in trainer.get("volumeMounts") or ():
        if str(mount.get("mountPath", "")).rstrip("/") == names.MEMORY_PATH:
            return f"volumeMount {mount['mountPath']}: Everstep mounts its memory there; move yours"
    for port in trainer.get("ports") or ():
        if (
            port.get("containerPort") == names.AGENT_PORT
            or port.get("name") == names.AGENT_PORT_NAME
        ):
            return f"port {port}: Everstep's agent uses {names.AGENT_PORT_NAME}/{names.AGENT_PORT}; move yours"
    return ""


def describe_unmounted(job: Job) -> str:
    """A warning if checkpoint.diskPath is on no volume of the training container; else empty. It is no
    conflict: the job trains without that tier, and a webhook may mount the volume.
    """
    path = job.spec.checkpoint.disk_path if job.spec is not None else None
    if not path:
        return ""
    trainer = find_trainer((job.raw_template.get("spec") or {}).get("containers") or [])
    if trainer is None:
        return ""
    inside = posixpath.normpath(path) + "/"
    mounts = (str(m.get("mountPath", "")) for m in trainer.get("volumeMounts") or ())
    if any(inside.startswith(mount.rstrip("/") + "/") for mount in mounts if mount):
        return ""
    return (
        f"the template mounts no volume at checkpoint.diskPath ({path}), so the copies there end with their container, "
        "and use up the node's ephemeral storage: mount a volume of the node's disk there, or remove diskPath"
    )


def find_trainer(containers: list[Body]) -> Body | None:
    named = [c for c in containers if c.get("name") == names.TRAINER_CONTAINER]
    if named:
        return named[0]
    return containers[0] if len(containers) == 1 else None


def build_pod(
    job: Job,
    spec: JobSpec,
    slot: int,
    attempt: int,
    avoid: Iterable[str] = (),
    shun: Iterable[str] = (),
    *,
    mates: Sequence[int] = (),
    spare: bool = False,
) -> Body:
    """The template must have no conflict (`find_conflict`).

    Args:
        avoid: nodes on which the pod must not run.
        shun: nodes on which it runs only if there is no other.
        mates: slots that form a unit with it; it prefers to run close to their pods.
        spare: it prefers a rack and a node without other pods of the job than its mates.
    """
    template = copy.deepcopy(dict(job.raw_template))
    pod_spec: Body = template.get("spec") or {}
    trainer = find_trainer(pod_spec["containers"])
    assert trainer is not None
    _add_agent(job, spec, pod_spec, trainer, slot, attempt)
    _add_memory(spec, pod_spec, trainer)
    affinities.exclude_nodes(pod_spec, sorted(set(avoid)))
    affinities.shun_nodes(pod_spec, sorted(set(shun)))
    affinities.draw_to_mates(pod_spec, job.uid, mates)
    if spare:
        affinities.keep_apart(pod_spec, job.uid, mates)
    add_restrictions(pod_spec)
    pod_spec["restartPolicy"] = "OnFailure"
    pod_spec["automountServiceAccountToken"] = False
    pod_spec.setdefault("terminationGracePeriodSeconds", GRACE_SECONDS)
    metadata = template.get("metadata") or {}
    labels = {
        **(metadata.get("labels") or {}),
        **_job_labels(job),
        names.LABEL_SLOT: str(slot),
        names.LABEL_ATTEMPT: str(attempt),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.pod_name(job.name, slot, attempt),
            "namespace": job.namespace,
            "labels": labels,
            "annotations": {**STAY_ANNOTATIONS, **(metadata.get("annotations") or {})},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": pod_spec,
    }


def _add_agent(
    job: Job, spec: JobSpec, pod_spec: Body, trainer: Body, slot: int, attempt: int
) -> None:
    grace = pod_spec.get("terminationGracePeriodSeconds", GRACE_SECONDS)
    values = build_env(job, spec, slot, attempt, grace).to_env()
    for name in (f"{PREFIX}TOKEN", f"{PREFIX}POD_IP"):
        values.pop(name)
    secret = {"name": secret_name(job.name, job.uid), "key": names.TOKEN_KEY}
    added: list[Body] = [{"name": k, "value": v} for k, v in sorted(values.items())]
    added += [
        {"name": f"{PREFIX}POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": f"{PREFIX}TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]
    trainer["env"] = [*added, *(trainer.get("env") or [])]
    port = {"name": names.AGENT_PORT_NAME, "containerPort": names.AGENT_PORT, "protocol": "TCP"}
    trainer["ports"] = [*(trainer.get("ports") or []), port]
    trainer["terminationMessagePath"] = names.TERMINATION_LOG


def build_env(job: Job, spec: JobSpec, slot: int, attempt: int, grace: float) -> AgentEnv:
    """Token and pod IP are placeholders, which the kubelet resolves."""
    return AgentEnv(
        job=f"{job.namespace}/{job.name}",
        job_uid=job.uid,
        slot=slot,
        attempt=attempt,
        token="",
        pod_ip="",
        port=names.AGENT_PORT,
        workers=spec.workers.processes_per_worker,
        mesh=spec.parallelism.mesh,
        uri=spec.checkpoint.uri.rstrip("/"),
        run=run_of(job, spec),
        run_given=int(spec.checkpoint.run is not None),
        if_run_exists=spec.checkpoint.if_run_exists.value,
        save_every_steps=spec.checkpoint.every_steps or 0,
        save_every_seconds=spec.checkpoint.save_seconds,
        keep=spec.checkpoint.keep,
        hang_seconds=float(spec.recovery.hang_seconds),
        startup_seconds=float(spec.recovery.startup_seconds),
        drain_seconds=float(spec.recovery.drain_timeout_seconds),
        gang_seconds=float(spec.recovery.gang_seconds),
        grace_seconds=choose_agent_grace(float(grace)),
        guard_factor=spec.guard.factor,
        guard_action=spec.guard.action.value,
        in_place=int(spec.recovery.in_place),
        on_loss=spec.recovery.on_loss.value,
        below_min_seconds=float(spec.recovery.below_min_seconds),
        max_redo_seconds=float(spec.recovery.max_redo_seconds),
        memory=names.MEMORY_PATH,
        peer_bandwidth=to_bytes(spec.checkpoint.peer_bandwidth),
        read_back_bandwidth=to_bytes(spec.checkpoint.read_back_bandwidth),
        disk_tier=spec.checkpoint.disk_path,
        disk_seconds=float(spec.checkpoint.disk_seconds),
        termination_log=names.TERMINATION_LOG,
    )


def choose_agent_grace(grace: float) -> float:
    """How many seconds of a pod's grace period its agent may use for its last save."""
    return max(1.0, grace - min(LONGEST_MARGIN, grace / 10))


def run_of(job: Job, spec: JobSpec) -> str:
    return spec.checkpoint.run or f"{job.namespace}/{job.name}"


def _add_memory(spec: JobSpec, pod_spec: Body, trainer: Body) -> None:
    size = spec.checkpoint.staging_memory
    _add_volume(pod_spec, trainer, names.MEMORY_VOLUME, names.MEMORY_PATH, size)
    mounted = {str(m.get("mountPath", "")).rstrip("/") for m in trainer["volumeMounts"]}
    if SHM_PATH not in mounted:
        _add_volume(pod_spec, trainer, SHM_VOLUME, SHM_PATH)
    resources = trainer.get("resources") or {}
    for kind in ("limits", "requests"):
        if "memory" in (resources.get(kind) or {}):
            resources[kind]["memory"] = _sum(resources[kind]["memory"], size)


def _add_volume(
    pod_spec: Body, trainer: Body, name: str, path: str, size: str | None = None
) -> None:
    memory: Body = {"medium": "Memory", **({"sizeLimit": size} if size else {})}
    pod_spec["volumes"] = [*(pod_spec.get("volumes") or []), {"name": name, "emptyDir": memory}]
    mount = {"name": name, "mountPath": path}
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or []), mount]


def _sum(own: str | int, more: str) -> str | int:
    """A value that is not a quantity is kept: the API server rejects it and names the field."""
    try:
        return str(to_bytes(str(own)) + to_bytes(more))
    except ValueError:
        return own


def to_bytes(quantity: str) -> int:
    """A Kubernetes quantity such as 2Gi, 1.5G or 1e9 in bytes. Raises ValueError for anything else."""
    size = to_number(quantity)
    if not size < 2**63:
        raise ValueError(f"{quantity!r} is not a quantity of memory: write it like 2Gi")
    return int(size)


def to_number(quantity: str) -> float:
    """The value of a Kubernetes quantity; nan if it is not one."""
    match = re.fullmatch(r"\+?([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", quantity)
    return float(match[1]) * _FACTORS.get(match[2], math.nan) if match else math.nan
