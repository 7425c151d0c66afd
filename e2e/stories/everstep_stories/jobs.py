"""The jobs of the stories, and the namespace in which they run."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from everstep_demo import trial
from everstep_demo.board import Object
from everstep_stories.clusters import Cluster

SCRIPTS = Path(__file__).parent.parent / "scripts"
LLAMA = Path(__file__).parents[3] / "examples" / "llama"
IMAGE = os.environ.get("EVERSTEP_E2E_IMAGE", "everstep/e2e-trainer:dev")
URI = f"{os.environ.get('EVERSTEP_E2E_STORE', 's3://everstep/stories')}/{secrets.token_hex(4)}"
"""A new folder for each test run: a job that continued a finished run would be Complete at once."""
DATASET, BATCH = 512, 8
"""The number of samples in the dataset of scripts/tiny.py, and in one of its steps."""
SECRET, SCRIPTS_MAP, SCRIPTS_PATH = "object-store", "scripts", "/scripts"
LLAMA_SCRIPT = "llama.py"
USER = 65532
NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata:\n"
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
    """A job as a user would write it for a namespace that enforces Pod Security "restricted"."""
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
    _fit(job)
    return job


def read_llama(steps: int) -> Object:
    """The manifest of examples/llama, with the stories' image, bucket and folder of scripts, and
    `steps` steps.
    """
    job: Object = yaml.safe_load((LLAMA / "job.yaml").read_text())
    job["spec"]["checkpoint"]["uri"] = URI
    container = _fit(job)
    container["image"] = IMAGE
    container["command"] = ["everstep", "run", f"{SCRIPTS_PATH}/{LLAMA_SCRIPT}"]
    container["env"] = [e for e in container["env"] if e["name"] != "LLAMA_STEPS"]
    container["env"].append({"name": "LLAMA_STEPS", "value": str(steps)})
    return job


def _fit(job: Object) -> Object:
    """Mount the scripts, and comply with Pod Security "restricted"; return the container."""
    pod = job["spec"]["workers"]["template"]["spec"]
    pod["volumes"] = [{"name": "scripts", "configMap": {"name": SCRIPTS_MAP}}]
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container: Object = pod["containers"][0]
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"] = [{"name": "scripts", "mountPath": SCRIPTS_PATH}]
    return container


class Workplace:
    """A namespace with the Secret of the object store and the scripts."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def make(self) -> None:
        """Create or update the namespace and its contents; delete the jobs in it."""
        kubectl = self.cluster.kubectl
        labels = "".join(f"    {k}: {v}\n" for k, v in RESTRICTED.items())
        kubectl(
            "apply", "-f", "-", stdin=f"{NAMESPACE}  name: {self.namespace}\n  labels:\n{labels}"
        )
        kubectl("delete", "rtj", "--all", "-n", self.namespace, timeout=120)
        self._share_store()
        llama = f"--from-file={LLAMA_SCRIPT}={LLAMA / 'train.py'}"
        self._apply("configmap", SCRIPTS_MAP, f"--from-file={SCRIPTS}", llama)

    def _share_store(self) -> None:
        """Create the Secret. In the kind lab, pods reach the store at a different address."""
        share = getattr(self.cluster, "share_store", None)
        if share is not None:
            share(self.namespace)
            return
        values = self.cluster.store_environment
        self._apply(
            "secret", "generic", SECRET, *(f"--from-literal={k}={values[k]}" for k in values)
        )

    def _apply(self, *what: str) -> None:
        inside = ("-n", self.namespace)
        made = self.cluster.kubectl(*inside, "create", *what, "--dry-run=client", "-o", "yaml")
        self.cluster.kubectl(*inside, "apply", "-f", "-", stdin=made)

    def delete(self) -> None:
        self.cluster.kubectl("delete", "namespace", self.namespace, timeout=180)
