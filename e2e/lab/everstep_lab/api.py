"""A minimal Kubernetes REST client. It works with paths and plain dicts, one token and one CA."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

_TIMEOUT = aiohttp.ClientTimeout(total=30)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=330)


class ApiError(Exception):
    """An error response; `reason` is the one in metav1.Status: NotFound, Conflict, …"""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class UnreachableError(Exception):
    """The API server did not answer; the same call may succeed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`type` is ADDED, MODIFIED or DELETED. `Api.follow` adds LISTED, whose `object` is a list."""

    type: str
    object: Object


class Api:
    """A client of one cluster. Use it with `async with`, or call `close`."""

    def __init__(self, url: str, *, token: str, ca: Path | str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._ca = str(ca)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, **params: str) -> Object:
        return await self._call("GET", path, params=params)

    async def list(self, path: str, **params: str) -> list[Object]:
        items: list[Object] = (await self.get(path, **params)).get("items", [])
        return items

    async def create(self, path: str, body: Object) -> Object:
        return await self._call("POST", path, body=body)

    async def replace(self, path: str, body: Object) -> Object:
        return await self._call("PUT", path, body=body)

    async def patch(self, path: str, body: Any, *, kind: str = MERGE, **params: str) -> Object:
        return await self._call("PATCH", path, body=body, content_type=kind, params=params)

    async def apply(self, path: str, body: Object, *, owner: str = "everstep-lab") -> Object:
        """Create or update the object by a forced server-side apply."""
        return await self.patch(path, body, kind=APPLY, fieldManager=owner, force="true")

    async def delete(self, path: str, *, grace: int | None = None, uid: str | None = None) -> None:
        """Delete an object; a missing one is no error. With `uid`, the object's uid must match."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", path, body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def text(self, path: str, **params: str) -> str:
        """The response body as text: logs, /readyz, /version."""
        async with self._request("GET", path, params=params) as answer:
            return await answer.text()

    async def watch(
        self, path: str, *, resource_version: str, **params: str
    ) -> AsyncIterator[Event]:
        """Yield the events after `resource_version`, until the server closes the stream.

        Raises:
            ApiError: 410 if the version is too old; the caller must list again.
            UnreachableError: the connection broke.
        """
        query = {
            **params, "watch": "true", "resourceVersion": resource_version,
            "allowWatchBookmarks": "true", "timeoutSeconds": "300",
        }  # fmt: skip
        async with self._request("GET", path, params=query, timeout=_WATCH_TIMEOUT) as answer:
            async for line in _lines(answer.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(
                        status.get("code", 500), status.get("reason", ""), status.get("message", "")
                    )
                yield Event(type=event["type"], object=event["object"])

    async def follow(self, path: str, **params: str) -> AsyncIterator[Event]:
        """List, then watch, forever. After an error, list again.

        Each list is yielded as one LISTED event; bookmarks are not yielded. Raises `ApiError` only
        for errors that a retry cannot fix (401, 403, 404).
        """
        while True:
            try:
                listed = await self.get(path, **params)
                yield Event(type="LISTED", object=listed)
                version = listed["metadata"]["resourceVersion"]
                async for event in self._rewatch(path, version, params):
                    yield event
            except UnreachableError:
                await asyncio.sleep(0.5)
            except ApiError as error:
                if error.status in (401, 403, 404):
                    raise
                await asyncio.sleep(0.5)

    async def _rewatch(
        self, path: str, version: str, params: Mapping[str, str]
    ) -> AsyncIterator[Event]:
        while True:
            async for event in self.watch(path, resource_version=version, **params):
                version = event.object["metadata"]["resourceVersion"]
                if event.type != "BOOKMARK":
                    yield event

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        async with self._request(
            method, path, body=body, params=params, content_type=content_type
        ) as answer:
            result: Object = await answer.json(content_type=None)
            return result

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> "_Answer":
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        pending = self._open().request(
            method, self.url + path, params=params, headers=headers, timeout=timeout,
            data=None if body is None else json.dumps(body).encode(),
        )  # fmt: skip
        return _Answer(pending)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = ssl.create_default_context(cafile=self._ca)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=64),
                headers={"Authorization": f"Bearer {self._token}"},
            )
        return self._session


class _Answer:
    """Turns aiohttp's errors and HTTP error statuses into this module's exceptions.

    This includes errors while the body is read.
    """

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            answer: aiohttp.ClientResponse = await self._pending.__aenter__()
            if answer.status >= 400:
                raise _error(answer.status, await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{type(error).__name__}: {error}") from error
        return answer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pending.__aexit__(kind, error, trace)
        if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError)):
            raise UnreachableError(f"{type(error).__name__}: {error}") from error


def _error(status: int, text: str) -> ApiError:
    try:
        document = json.loads(text)
        return ApiError(status, document.get("reason", ""), document.get("message", text))
    except (ValueError, AttributeError):
        return ApiError(status, "", text.strip())


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length; a watch event may exceed StreamReader's line limit."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
