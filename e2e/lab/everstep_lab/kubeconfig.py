"""Builds and reads kubeconfig documents, and writes files that only their owner may read."""

import base64
import json
import os
from pathlib import Path

HEADER = "# everstep-lab"


def build(url: str, ca: bytes, token: str, user: str, cluster: str = "everstep-lab") -> str:
    """A kubeconfig with one cluster, one user and one context, as JSON, which is valid YAML."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": cluster,
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(ca).decode(),
                },
            }
        ],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": user}}],
        "current-context": cluster,
    }
    return f"{HEADER}\n{json.dumps(document, indent=2)}\n"


def is_ours(path: Path) -> bool:
    """Whether a lab wrote this file, so that a lab may overwrite or remove it."""
    try:
        return path.read_text(errors="replace").startswith(HEADER)
    except OSError:
        return False


def write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read(path: Path) -> tuple[str, str]:
    """Read the API server's URL and the token from a file that `build` made."""
    document = json.loads(path.read_text().removeprefix(HEADER))
    return document["clusters"][0]["cluster"]["server"], document["users"][0]["user"]["token"]
