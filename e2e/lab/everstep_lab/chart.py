"""What of the Helm chart the lab installs: rights, policies and CRDs, as they are shipped.

The operator itself is a process of this machine here, so Deployment, Secret and hooks stay out.
"""

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

from everstep_lab.seam import LabError

FOLDER = Path(__file__).resolve().parents[3] / "charts" / "everstep"
RELEASE = "everstep"
NAMESPACE = "everstep-system"
KUBERNETES = "1.36.3"
INSTALLED = (
    "crds.yaml",
    "serviceaccounts.yaml",
    "rbac-jobs.yaml",
    "rbac-nodes.yaml",
    "rbac-users.yaml",
    "policy-nodes.yaml",
    "policy-authors.yaml",
)
_NAMESPACE = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n---\n"


async def render_installed(helm: Path, *, observe_only: bool) -> str:
    """YAML, the namespace first. Raises LabError with Helm's own words."""
    values = [f"observeOnly={str(observe_only).lower()}"]
    shown = await asyncio.to_thread(render, helm, only=INSTALLED, values=values)
    return _NAMESPACE + shown


def render(
    helm: Path, *, only: Sequence[str] = (), values: Sequence[str] = (), files: Sequence[Path] = ()
) -> str:
    """`helm template`; `only` names templates, `values` are --set, `files` are --values."""
    command = [
        str(helm), "template", RELEASE, str(FOLDER), f"--namespace={NAMESPACE}",
        f"--kube-version={KUBERNETES}",
        *(f"--show-only=templates/{name}" for name in only),
        *(f"--set={value}" for value in values),
        *(f"--values={path}" for path in files),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise LabError(f"`helm template` of {FOLDER} failed:\n{done.stderr.strip()}")
    return done.stdout
