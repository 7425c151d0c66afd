"""Builds the manifests of the kind lab's cluster as plain dicts. Pure."""

from collections.abc import Mapping
from typing import Any

from everstep_lab.kind import places

Object = dict[str, Any]

ADMIN = "everstep-lab-admin"
_GRACE_SHARE = 4


def build_cluster(*, nodes: int, grace_seconds: int, packages: str, store_port: int) -> Object:
    """The configuration for `kind create cluster`: one control plane and `nodes` workers.

    `packages` is the host's folder of Python packages. It is mounted at PYTHON_TREE on every
    worker. The object store listens on 127.0.0.1:`store_port` of the host. A node becomes NotReady
    after `grace_seconds` without a heartbeat (Kubernetes: 50).
    """
    worker = {
        "role": "worker",
        "extraMounts": [
            {"hostPath": packages, "containerPath": places.PYTHON_TREE, "readOnly": True}
        ],
    }
    control = {
        "role": "control-plane",
        "extraPortMappings": [
            {
                "containerPort": places.STORE_NODE_PORT, "hostPort": store_port,
                "listenAddress": "127.0.0.1",
            }
        ],
    }  # fmt: skip
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [control, *(dict(worker) for _ in range(nodes))],
        "kubeadmConfigPatches": [_kubeadm(grace_seconds), _kubelet(grace_seconds)],
    }


def _kubeadm(grace_seconds: int) -> str:
    return "\n".join(
        [
            "kind: ClusterConfiguration",
            "etcd:",
            "  local:",
            # etcd's data need not outlive the lab, and fsync on a busy disk delays every write.
            "    extraArgs:",
            "    - name: unsafe-no-fsync",
            '      value: "true"',
            "controllerManager:",
            "  extraArgs:",
            "  - name: node-monitor-grace-period",
            f'    value: "{grace_seconds}s"',
            "  - name: node-monitor-period",
            '    value: "1s"',
        ]
    )


def _kubelet(grace_seconds: int) -> str:
    """The kubelet renews its lease four times during the lease's duration."""
    return "\n".join(
        [
            "kind: KubeletConfiguration",
            f"nodeLeaseDurationSeconds: {max(grace_seconds // 2, _GRACE_SHARE)}",
            f"nodeStatusUpdateFrequency: {max(grace_seconds // _GRACE_SHARE, 1)}s",
        ]
    )


def build_objects(
    *, gpus: int, seed: int, store: Mapping[str, str], data_node: str
) -> list[Object]:
    """The lab's objects: namespace, administrator, DaemonSet of the nodes, object store."""
    return [
        _object("v1", "Namespace", places.NAMESPACE),
        *_admin(),
        _lab_node(gpus, seed),
        _store(store, data_node),
        _store_service(),
    ]


def build_store_secret(environment: Mapping[str, str], namespace: str) -> Object:
    secret = _object("v1", "Secret", places.STORE, namespace)
    return {**secret, "stringData": dict(environment)}


def _admin() -> list[Object]:
    """A ServiceAccount for the user's token; kind's own kubeconfig has a certificate instead."""
    account = _object("v1", "ServiceAccount", ADMIN, places.NAMESPACE)
    binding = _object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", ADMIN)
    return [
        account,
        {
            **binding,
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                "name": "cluster-admin",
            },
            "subjects": [
                {"kind": "ServiceAccount", "name": ADMIN, "namespace": places.NAMESPACE}
            ],
        },
    ]  # fmt: skip


def _lab_node(gpus: int, seed: int) -> Object:
    labels = {
        "app.kubernetes.io/name": "dcgm-exporter",
        "app.kubernetes.io/part-of": "everstep-lab",
    }
    folder = {"name": "lab", "mountPath": places.NODE_FOLDER}
    container = {
        "name": "lab-node",
        "image": "everstep/lab-node:dev",
        "imagePullPolicy": "IfNotPresent",
        # The lab-node kills processes of other containers, and reads their environments to find
        # which GPU they use.
        "securityContext": {"privileged": True},
        "ports": [{"name": "metrics", "containerPort": 9400}],
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "LAB_GPUS", "value": str(gpus)},
            {"name": "LAB_SEED", "value": str(seed)},
            {"name": "LAB_STATE", "value": places.NODE_FOLDER},
            {"name": "LAB_PYTHON_TREE", "value": places.PYTHON_TREE},
        ],
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "volumeMounts": [
            folder,
            {"name": "plugins", "mountPath": "/var/lib/kubelet/device-plugins"},
            {"name": "resources", "mountPath": "/var/lib/kubelet/pod-resources"},
        ],
    }
    pod = {
        "hostPID": True,
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": 3,
        "tolerations": [{"operator": "Exists"}],
        "affinity": _away_from_control_plane(),
        "containers": [container],
        "volumes": [
            _host_path("lab", places.NODE_FOLDER),
            _host_path("plugins", "/var/lib/kubelet/device-plugins"),
            _host_path("resources", "/var/lib/kubelet/pod-resources"),
        ],
    }
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {**_object("apps/v1", "DaemonSet", "lab-node", places.EXPORTER_NAMESPACE), "spec": spec}


def _away_from_control_plane() -> Object:
    rule = {"key": "node-role.kubernetes.io/control-plane", "operator": "DoesNotExist"}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [rule]}]
            }
        }
    }


def _store(environment: Mapping[str, str], node: str) -> Object:
    """The object store. It runs on the control plane's node and keeps its data there.

    Faults of workers therefore do not affect it.
    """
    labels = {"app.kubernetes.io/name": places.STORE}
    server = {
        "MINIO_ROOT_USER": environment["AWS_ACCESS_KEY_ID"],
        "MINIO_ROOT_PASSWORD": environment["AWS_SECRET_ACCESS_KEY"],
        "MINIO_SITE_REGION": environment["AWS_REGION"],
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
        "MINIO_CI_CD": "on",
        "HOME": "/data",
    }
    probe = {"httpGet": {"path": "/minio/health/live", "port": places.STORE_PORT}}
    container = {
        "name": "minio",
        "image": "everstep/lab-minio:dev",
        "imagePullPolicy": "IfNotPresent",
        "args": ["server", "--address", f":{places.STORE_PORT}", "/data/objects"],
        "env": [{"name": name, "value": value} for name, value in server.items()],
        "readinessProbe": {**probe, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [_host_path("data", f"{places.NODE_FOLDER}/store")],
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {**_object("apps/v1", "Deployment", places.STORE, places.NAMESPACE), "spec": spec}


def _store_service() -> Object:
    port = {"port": places.STORE_PORT, "nodePort": places.STORE_NODE_PORT}
    spec = {
        "type": "NodePort",
        "selector": {"app.kubernetes.io/name": places.STORE},
        "ports": [port],
    }
    return {**_object("v1", "Service", places.STORE, places.NAMESPACE), "spec": spec}


def _host_path(name: str, path: str) -> Object:
    return {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def _object(version: str, kind: str, name: str, namespace: str = "") -> Object:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **where}}
