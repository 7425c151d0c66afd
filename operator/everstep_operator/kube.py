"""The only port to the API server: plain objects in and out, errors classified, writes
rate-limited.

Built on the official client's asyncio half (`kubernetes.aio`), for its configuration, tokens
and TLS; its typed models are not used. Reads are not limited, because there are few: most of the
state comes from the watches.

Every write takes a token from the bucket. A recovery may use the full bucket; status writes and
Events may use only the half that is not reserved for recoveries. Then the write passes the gate:
a replica without the lease writes nothing, and no write outlives the lease's deadline.
"""

import asyncio
import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from everstep_contract import names
from everstep_operator.answers import AlreadyExists as AlreadyExists
from everstep_operator.answers import Conflict as Conflict
from everstep_operator.answers import Denied as Denied
from everstep_operator.answers import Gone as Gone
from everstep_operator.answers import Invalid as Invalid
from everstep_operator.answers import KubeError as KubeError
from everstep_operator.answers import Standby as Standby
from everstep_operator.answers import Transient as Transient
from everstep_operator.answers import classify_error, parse_retry_after
from everstep_operator.answers import has_failed_webhook as has_failed_webhook
from everstep_operator.answers import is_denied_by_policy as is_denied_by_policy
from everstep_operator.pacing import Bucket, Lane

REQUEST_SECONDS = 30.0
Object = dict[str, Any]
JsonPatch = list[Object]

_UNREADABLE = (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError)
"""What the official client raises for a kubeconfig that is missing, no YAML, or of another structure, and for
certificates that cannot be read.
"""


class NoCluster(Exception):
    """There is nothing to connect to."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind's group and version; `group` "" is the core group."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, sub: str | None = None) -> str:
        head = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [head]
        if namespace:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        parts += [quote(p, safe="") for p in (name, sub) if p]
        return "/".join(parts)


PODS = Kind("", "v1", "pods")
NODES = Kind("", "v1", "nodes")
SECRETS = Kind("", "v1", "secrets")
EVENTS = Kind("", "v1", "events")
ACCOUNTS = Kind("", "v1", "serviceaccounts")
DEFINITIONS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions")
LEASES = Kind("coordination.k8s.io", "v1", "leases")
JOBS = Kind(names.GROUP, names.VERSION, names.PLURAL)
QUARANTINES = Kind(names.GROUP, names.VERSION, names.QUARANTINE_PLURAL)


class Tokens(Protocol):
    """Bearer tokens of one identity."""

    async def current(self) -> str: ...

    def refuse(self, value: str) -> None: ...


class Kube:
    """A client with one identity, one bucket and one gate. Create it with `await Kube.connect(…)`,
    and close it at the end.
    """

    def __init__(
        self,
        client: ApiClient,
        bucket: Bucket,
        *,
        identity: str = "operator",
        tokens: Tokens | None = None,
    ) -> None:
        self._client, self._tokens = client, tokens
        self.bucket, self.identity = bucket, identity
        self.seconds_left: Callable[[], float] = lambda: math.inf
        """How long writes are allowed from now on; 0 or less: not at all."""
        self.went_back = asyncio.Event()
        """Set when a list is older than one that was read before it was requested: see `list`."""
        self._newest_lists: dict[Kind, int] = {}
        self.calls: dict[tuple[str, str], int] = {}
        """Calls by (verb, outcome), for the metrics."""

    @classmethod
    async def connect(
        cls,
        *,
        qps: float = 20.0,
        burst: int = 40,
        kubeconfig: str | None = None,
        identity: str = "operator",
    ) -> "Kube":
        """Connect with the given file, $KUBECONFIG or ~/.kube/config, else with the pod's service
        account.

        Raises:
            NoCluster: none of them exists, or it cannot be read.
        """
        configuration = Configuration()
        path = kubeconfig or os.environ.get("KUBECONFIG")
        try:
            if path or not os.environ.get("KUBERNETES_SERVICE_HOST"):
                await config.load_kube_config(path, client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            client = ApiClient(configuration)
        except _UNREADABLE as error:
            raise NoCluster(
                f"no cluster to connect to ({error}): set KUBECONFIG, or run in a pod with a service account"
            ) from None
        return cls(client, Bucket(qps, burst), identity=identity)

    def build_other(self, identity: str, tokens: Tokens) -> "Kube":
        """A client of the same server with another identity: it uses that identity's tokens, and
        none of the operator's credentials.
        """
        configuration = copy.deepcopy(self._client.configuration)
        configuration.cert_file = configuration.key_file = None
        configuration.username = configuration.password = None
        configuration.refresh_api_key_hook = None
        configuration.api_key = {}
        return Kube(ApiClient(configuration), self.bucket, identity=identity, tokens=tokens)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects of the kind and the resourceVersion of the list, in pages of 500.

        Such lists are consistent reads: their version decreases only if etcd was restored to an
        older state. Mirrors and watches, which compare versions, are unreliable from then on.
        """
        items: list[Object] = []
        known = self._newest_lists.get(kind, 0)
        query = {"limit": "500", "labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in query.items() if value}
        while True:
            page = await self._call("GET", kind.path(namespace), query=query)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            self._note_version(kind, str(metadata.get("resourceVersion", "")), known)
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": metadata["continue"]}

    def _note_version(self, kind: Kind, version: str, known: int) -> None:
        number = int(version) if version.isdigit() else known
        if number < known:
            self.went_back.set()
        self._newest_lists[kind] = max(self._newest_lists.get(kind, 0), number)

    async def create(
        self,
        kind: Kind,
        body: Object,
        namespace: str | None = None,
        *,
        name: str | None = None,
        sub: str | None = None,
        dry_run: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> Object:
        """Create the object. `name` and `sub` are only for a subresource, such as a token."""
        await self.bucket.take(lane)
        query = {"dryRun": "All"} if dry_run else {}
        return await self._call("POST", kind.path(namespace, name, sub), body=body, query=query)

    async def replace(self, kind: Kind, name: str, namespace: str | None, body: Object) -> Object:
        """Replace the object. Raises `Conflict` if it has changed since the resourceVersion in
        `body`.
        """
        await self.bucket.take(Lane.RECOVERY)
        return await self._call("PUT", kind.path(namespace, name), body=body)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str,
        grace_seconds: int | None = None,
        lane: Lane = Lane.RECOVERY,
    ) -> None:
        """Delete the object with this UID. Raises `Conflict` if the name belongs to another one."""
        await self.bucket.take(lane)
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        await self._call("DELETE", kind.path(namespace, name), body=body)

    async def patch(
        self,
        kind: Kind,
        name: str,
        body: Object | JsonPatch,
        namespace: str | None = None,
        *,
        sub: str | None = None,
        strategic: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> Object:
        """Send a merge patch, a JSON patch (a list) or a strategic merge patch.

        A `metadata.resourceVersion` in a merge patch is a precondition: `Conflict` if the object
        has changed.
        """
        await self.bucket.take(lane)
        kind_of_patch = (
            "json" if isinstance(body, list) else "strategic-merge" if strategic else "merge"
        )
        return await self._call(
            "PATCH",
            kind.path(namespace, name, sub),
            body=body,
            content=f"application/{kind_of_patch}-patch+json",
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:
        try:
            answer = await self._request(method, path, body, query or {}, content)
        except KubeError as error:
            self._count(method, _outcome(method, path, error))
            raise
        self._count(method, "Done")
        return answer

    async def _request(
        self, method: str, path: str, body: Any, query: Mapping[str, str], content: str
    ) -> Object:
        headers: dict[str, str] = {"Accept": "application/json", "Content-Type": content}
        url = self._client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        for last in (False, True):
            token = await self._authorize(headers, path, method, body)
            status, raw, pause = await self._send(method, url, headers, body)
            if status != 401 or token is None or last:
                break
            assert self._tokens is not None
            self._tokens.refuse(token)
        if not 200 <= status < 300:
            refusal = classify_error(status, raw)
            refusal.retry_after = parse_retry_after(pause)
            raise refusal
        try:
            document: Object = json.loads(raw)
        except ValueError:
            text = f"{method} {url}: the answer is not JSON, or is incomplete: {raw[:80]!r}"
            raise Transient(status, "NotJson", text) from None
        return document

    async def _authorize(
        self, headers: dict[str, str], path: str, method: str, body: Any
    ) -> str | None:
        """Add the credentials to `headers`; return the token if it comes from `self._tokens`."""
        if self._tokens is None:
            auth = ["BearerToken"]
            await self._client.update_params_for_auth(headers, [], auth, path, method, body)
            return None
        token = await self._tokens.current()
        headers["Authorization"] = f"Bearer {token}"
        return token

    async def _send(
        self, method: str, url: str, headers: dict[str, str], body: Any
    ) -> tuple[int, bytes, str]:
        """Status, body, and the Retry-After of the answer."""
        limit = self._limit(method)
        try:
            async with asyncio.timeout(limit):
                response = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
                    method, url, headers=headers, body=body
                )
                raw = await response.read()
                return response.status, raw, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or _describe_silence(limit)
            raise Transient(0, type(error).__name__, f"{method} {url}: {why}") from error

    def _limit(self, method: str) -> float:
        """How long the request may take, in seconds. Raises `Standby` if it must not be sent."""
        if method == "GET":
            return REQUEST_SECONDS
        left = self.seconds_left()
        if left <= 0:
            raise Standby(0, "Standby", "this replica does not hold the lease: nothing is written")
        return min(REQUEST_SECONDS, left)

    def _count(self, verb: str, outcome: str) -> None:
        self.calls[verb, outcome] = self.calls.get((verb, outcome), 0) + 1


def _outcome(method: str, path: str, error: KubeError) -> str:
    """A refused pod is most often a user's quota or template, and so is the Secret that it needs: it
    is reported at the job, and does not count as a write that Everstep may not do. A missing right
    does.
    """
    refused = isinstance(error, Denied | Invalid) and "cannot create resource" not in error.message
    if refused and method == "POST" and path.endswith(("/pods", "/secrets")):
        return "PodRefused"
    return type(error).__name__


def _describe_silence(limit: float) -> str:
    if limit < REQUEST_SECONDS:
        return f"no answer within the {limit:.1f} s for which this replica still held the lease"
    return f"no answer within {limit:.0f} s"
