"""The jobs of the stories, and the namespace in which they run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep_demo import trial
from everstep_demo.board import Object
from everstep_stories.clusters import STORE_VARIABLES, Cluster

SCRIPTS = Path(__file__).parent.parent / "scripts"
IMAGE = os.environ.get("EVERSTEP_E2E_IMAGE", "everstep/e2e-trainer:dev")
URI = os.environ.get("EVERSTEP_E2E_STORE", "s3://everstep/stories")
DATASET, BATCH = 512, 8
"""Samples of scripts/tiny.py, and how many of them one step takes."""
SECRET, SCRIPTS_MAP, SCRIPTS_PATH = "object-store", "scripts", "/scripts"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def build_job(
    name: str,
    *,
    replicas: int = 2,
    steps: int = 1_000_000,
    image: str = IMAGE,
    spec: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Object:
    """As a user would write it for a namespace that enforces Pod Security "restricted"."""
    job = trial.build_job(
        name,
        replicas=replicas,
        image=image,
        command=("everstep", "run", f"{SCRIPTS_PATH}/tiny.py"),
        env={"TINY_STEPS": str(steps), **(env or {})},
        uri=URI,
        secret=SECRET,
        spec=spec,
    )
    pod = job["spec"]["workers"]["template"]["spec"]
    pod["volumes"] = [{"name": "scripts", "configMap": {"name": SCRIPTS_MAP}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "scripts", "mountPath": SCRIPTS_PATH}]
    return job


class Workplace:
    """A namespace with what jobs need: the Secret of the object store, the scripts."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def make(self, *, secret: Mapping[str, str] | None = None) -> None:
        """Makes it or brings it up to date."""
        kubectl = self.cluster.kubectl
        labels = "".join(f"    {k}: {v}\n" for k, v in RESTRICTED.items())
        text = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {self.namespace}\n  labels:\n{labels}"
        kubectl("apply", "-f", "-", stdin=text)
        values = secret if secret is not None else self._secret()
        given = [f"--from-literal={k}={v}" for k, v in values.items()]
        self._apply("secret", "generic", SECRET, *given)
        self._apply("configmap", SCRIPTS_MAP, f"--from-file={SCRIPTS}")

    def _secret(self) -> Mapping[str, str]:
        """The store as pods reach it: the lab's own Secret, else the environment."""
        inside: Mapping[str, str] | None = getattr(self.cluster, "pod_store_environment", None)
        if inside is not None:
            return inside
        everywhere = self.cluster.store_environment
        return {
            k: everywhere[k] for k in everywhere if k in STORE_VARIABLES or k.startswith("AWS_")
        }

    def _apply(self, *what: str) -> None:
        inside = ("-n", self.namespace)
        made = self.cluster.kubectl(*inside, "create", *what, "--dry-run=client", "-o", "yaml")
        self.cluster.kubectl(*inside, "apply", "-f", "-", stdin=made)

    def delete(self) -> None:
        self.cluster.kubectl("delete", "namespace", self.namespace, timeout=180)
