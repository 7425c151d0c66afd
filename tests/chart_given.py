"""The chart's files and the objects that it renders."""

from collections.abc import Awaitable, Callable, Iterable

import yaml

from everstep_lab import Lab, chart
from everstep_lab.api import Api, Object

As = Callable[[str, str], Awaitable[Api]]
"""(namespace, ServiceAccount) → a client with its token."""
CASES = sorted((chart.FOLDER / "ci").glob("*-values.yaml"))


def read_documents(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def find(documents: Iterable[Object], kind: str, name: str) -> Object:
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(found) == 1, f"found {len(found)} objects {kind} {name}"
    return found[0]


def arguments_of(deployment: Object) -> list[str]:
    arguments: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def apply(lab: Lab, text: str) -> None:
    lab.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text, timeout=120)
