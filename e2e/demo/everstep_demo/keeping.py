"""Keeps the logs of a lab and its pods, so that a failure can be diagnosed."""

import shutil
from pathlib import Path

from everstep_lab import Lab


def keep_logs(lab: Lab, folder: Path) -> Path:
    """Copy logs, pods' output, objects and Events to `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(lab.logs, folder)
    for kind in ("rtj", "pods", "nodes", "nodequarantines", "events"):
        text = lab.kubectl("get", kind, "-A", "-o", "yaml", check=False)
        (folder / f"{kind}.yaml").write_text(text)
    for pod in lab.kubectl("get", "pods", "-o", "name", check=False).split():
        text = lab.kubectl("logs", pod, check=False)
        (folder / f"{pod.rpartition('/')[2]}.log").write_text(text)
    return folder
