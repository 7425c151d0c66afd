"""The pod that reads a run for the plugin: the job's own template with another command. Pure.

The plugin's user needs no keys for the object store: they stay in the cluster. The pod has the
job's image, environment, volumes, service account, security context, labels and annotations: some
clouds, meshes and network policies decide by labels which pods reach the store. It has no GPU and
ends within a limit. The job owns it, so it never outlives the job.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from everstep_contract import names
from everstep_contract.pod_security import add_restrictions

Raw = Mapping[str, Any]
Body = dict[str, Any]
CONTAINER = "reader"
LABEL = f"{names.GROUP}/reader"
REQUESTS = {"cpu": "100m", "memory": "256Mi"}
INIT_REQUESTS = {"cpu": "10m", "memory": "16Mi"}
"""Of each init container: a request must not exceed the container's own limit, which may be small."""
OF_OTHERS = (f"{names.GROUP}/", "kueue.x-k8s.io/", "k8s.v1.cni.cncf.io/")
"""Labels and annotations that it must not have: Everstep's own, those with which a queue would hold
it, and those that attach network devices.
"""
QUEUE = "kueue.x-k8s.io/queue-name"
DROPPED = ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports", "args")


def build_pod(job: Raw, arguments: Sequence[str], *, seconds: float, suffix: str) -> Body:
    """The pod that runs `everstep ARGUMENTS`.

    Args:
        seconds: the time after which the kubelet ends it.
        suffix: makes the name unique; lower-case letters and digits.

    Raises:
        LookupError: the template has no container that trains.
    """
    template = job["spec"]["workers"]["template"]
    spec: Body = copy.deepcopy(dict(template.get("spec") or {}))
    trainer = find_trainer(spec.get("containers") or [])
    devices = _list_devices(trainer.get("resources") or {})
    for name in DROPPED:
        trainer.pop(name, None)
    trainer |= {
        "name": CONTAINER,
        "command": [program_of(trainer.get("command") or ()), *arguments],
        "resources": _without_devices(trainer.get("resources") or {}),
    }
    spec.pop("resourceClaims", None)  # the pod's devices; `resources` name them
    for container in spec.get("initContainers") or []:
        own = container.get("resources") or {}
        container["resources"] = _without_devices(own, INIT_REQUESTS)
    spec |= {
        "containers": [trainer],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max(1, round(seconds)),
        "automountServiceAccountToken": False,
        "tolerations": _tolerate(spec.get("tolerations") or [], devices),
    }
    add_restrictions(spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, template.get("metadata") or {}, suffix),
        "spec": spec,
    }


def find_trainer(containers: Sequence[Body]) -> Body:
    named = [c for c in containers if c.get("name") == names.TRAINER_CONTAINER]
    if not named and len(containers) != 1:
        raise LookupError(f"the template has no container named {names.TRAINER_CONTAINER}")
    return (named or list(containers))[0]


def program_of(command: Sequence[str]) -> str:
    """The job's own `everstep`, with its path if it has one."""
    first = str(command[0]) if command else ""
    return first if first.rsplit("/", 1)[-1] == "everstep" else "everstep"


def _list_devices(resources: Raw) -> list[str]:
    return [name for name in resources.get("limits") or {} if "/" in name]


def _tolerate(own: Sequence[Body], devices: Sequence[str]) -> list[Body]:
    """The template's tolerations, and one for the taint that is named after each device. Kubernetes adds it to pods
    that request the device (ExtendedResourceToleration, as on GKE), and a nodeSelector may leave only nodes with
    the taint.
    """
    return [*own, *({"key": name, "operator": "Exists"} for name in devices)]


def _without_devices(resources: Raw, requests: Mapping[str, str] = REQUESTS) -> Body:
    """The limits without devices, whose resource names have a slash (nvidia.com/gpu), and small
    requests.
    """
    limits = {k: v for k, v in (resources.get("limits") or {}).items() if "/" not in k}
    return {"requests": dict(requests), **({"limits": limits} if limits else {})}


def _metadata(job: Raw, of_template: Raw, suffix: str) -> Body:
    meta = job["metadata"]
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return {
        "name": f"{meta['name']}-reader-{suffix}",
        "namespace": meta["namespace"],
        "labels": {
            **_without_others(of_template.get("labels") or {}),
            "app.kubernetes.io/name": "everstep-reader",
            LABEL: meta["name"],
        },
        "annotations": _without_others(of_template.get("annotations") or {}),
        "ownerReferences": [owner],
    }


def _without_others(named: Raw) -> Body:
    return {key: value for key, value in named.items() if not key.startswith(OF_OTHERS)}


def run_of(job: Raw) -> str:
    """Address of the run, from the spec: a job that never ran has no status."""
    checkpoint = job["spec"]["checkpoint"]
    return f"{checkpoint['uri'].rstrip('/')}/{name_of_run(job)}"


def name_of_run(job: Raw) -> str:
    meta = job["metadata"]
    return str(job["spec"]["checkpoint"].get("run") or f"{meta['namespace']}/{meta['name']}")


def describe_ended(pod: Raw) -> tuple[int, str] | None:
    """Exit status and last lines; None: the pod has not ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    for found in status.get("containerStatuses") or ():
        ended = (found.get("state") or {}).get("terminated")
        if found.get("name") == CONTAINER and ended:
            # The message of the pod says that its time is over.
            words = ended.get("message") or status.get("message") or ""
            return int(ended.get("exitCode", 1)), str(words).strip()
    return 1, str(status.get("message") or status.get("reason") or "it ended without a message")


def is_running(pod: Raw) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def describe_wait(pod: Raw) -> str:
    """Why the pod does not run yet, in the scheduler's or the kubelet's words; empty: it runs."""
    status = pod.get("status") or {}
    for found in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        waiting = (found.get("state") or {}).get("waiting") or {}
        if waiting.get("message"):
            return f"{waiting.get('reason')}: {waiting['message']}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return ""


def find_restore_problem(job: Raw, *, new: str, run: str) -> str:
    """Which option of `restore` makes a job that cannot exist beside the old one; empty: none does."""
    if problem := names.find_job_name_problem(new):
        return f"--as: {problem}"
    if new == job["metadata"]["name"]:
        return f"--as: {new!r} is the old job: give the new one another name"
    if problem := names.find_run_problem(run):
        return f"--run: {problem}"
    return ""


def build_restored(job: Raw, *, new: str, run: str) -> Body:
    """The job that continues from the fork: the old one's spec with another name and run. The run exists, so
    `ifRunExists: Refuse` would fail the job. A job with a queue's label starts when the queue admits it.
    """
    spec = copy.deepcopy(dict(job["spec"]))
    spec["checkpoint"] = {**spec["checkpoint"], "run": run}
    for of_the_old in ("pin", "ifRunExists"):
        spec["checkpoint"].pop(of_the_old, None)
    spec.pop("suspend", None)
    meta = job["metadata"]
    if QUEUE in (meta.get("labels") or {}):
        spec["suspend"] = True
    _select(spec["workers"]["template"], str(meta["name"]), new)
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "metadata": {
            "name": new,
            "namespace": meta["namespace"],
            **({"labels": meta["labels"]} if meta.get("labels") else {}),
        },
        "spec": spec,
    }


def _select(value: Any, old: str, new: str) -> None:
    """Let selectors of the old job's pods, in rules that spread a job's pods over nodes, select the new one's."""
    if isinstance(value, dict):
        if value.get(names.LABEL_JOB) == old:
            value[names.LABEL_JOB] = new
        if value.get("key") == names.LABEL_JOB and isinstance(value.get("values"), list):
            value["values"] = [new if v == old else v for v in value["values"]]
        for part in value.values():
            _select(part, old, new)
    elif isinstance(value, list):
        for part in value:
            _select(part, old, new)
