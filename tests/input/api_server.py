"""A client that asks a real API server whether it would accept an object, by strict dry runs."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep_contract import names

Object = dict[str, Any]
JOBS = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/default/{names.PLURAL}"


class ApiServer:
    """One connection that stays open. Not safe for use by several threads."""

    def __init__(self, url: str, *, token: str, ca: Path) -> None:
        place = urlsplit(url)
        self._token = token
        self._line = http.client.HTTPSConnection(
            place.netloc, timeout=60, context=ssl.create_default_context(cafile=str(ca))
        )

    def close(self) -> None:
        self._line.close()

    def ask(self, body: Object) -> tuple[int, Object]:
        """Return the status and the answer of creating the object in a dry run."""
        return self.send("POST", f"{JOBS}?dryRun=All&fieldValidation=Strict", body)

    def send(
        self, method: str, path: str, body: Any, kind: str = "application/json"
    ) -> tuple[int, Object]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        self._line.request(method, path, json.dumps(body).encode(), headers)
        with self._line.getresponse() as answer:
            document: Object = json.loads(answer.read())
            return answer.status, document


def a_document(spec: Any, name: str = "asked") -> Object:
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
