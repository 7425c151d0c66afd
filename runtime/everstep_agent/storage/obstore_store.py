"""The one file that knows obstore: folders, S3, Google Cloud Storage, Azure, memory."""

import asyncio
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore import store as stores

from everstep_agent.storage.address import Address, build_s3_config, check_key
from everstep_agent.storage.errors import (
    BadAddress,
    NotFound,
    StoreError,
    TooLarge,
    Unreachable,
    classify_error,
)

_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
"""Trying again is `retrying.Retrying`'s, where the trouble can be seen and reported."""
_TIMEOUT = timedelta(seconds=120)
"""Of one request: a 64 MiB chunk at 0.6 MB/s."""
STALL_SECONDS = 15.0
"""A server that has sent nothing for so long will not: the request is made anew."""
LIMIT_BYTES = 1024**3
"""Of an object that is read. Ours have 64 MiB at most, a ledger or a manifest perhaps more."""


class ObstoreStore:
    def __init__(self, backend: Any, uri: str, *, folder: Path | None = None) -> None:
        self._backend = backend
        self._uri = uri
        self._folder = folder

    @property
    def uri(self) -> str:
        return self._uri

    async def put(self, key: str, body: bytes | memoryview) -> None:
        await self._write(key, body, "overwrite")

    async def create(self, key: str, body: bytes | memoryview) -> None:
        await self._write(key, body, "create")

    async def _write(self, key: str, body: bytes | memoryview, mode: Any) -> None:
        check_key(key)
        try:
            # One PUT, never a multipart upload: only a single PUT can be create-only.
            async with asyncio.timeout(STALL_SECONDS + len(body) / 2**20):
                await obstore.put_async(self._backend, key, body, mode=mode, use_multipart=False)
            if self._folder is not None:
                await asyncio.to_thread(_sync, self._folder / key)
        except Exception as error:
            raise self._ours(error, "write", key) from None

    async def get(self, key: str) -> bytes:
        check_key(key)
        try:
            async with asyncio.timeout(STALL_SECONDS):
                answer = await obstore.get_async(self._backend, key)
            if answer.meta["size"] > LIMIT_BYTES:
                raise TooLarge(f"{self._uri}/{key} has {answer.meta['size']} bytes: none of ours")
            return await _read(answer)
        except Exception as error:
            raise self._ours(error, "read", key) from None

    async def list(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        try:
            async for batch in obstore.list(self._backend, prefix or None, chunk_size=1000):
                found += [meta["path"] for meta in batch]
        except Exception as error:
            raise self._ours(error, "list", prefix) from None
        return sorted(found)

    async def delete(self, key: str) -> None:
        check_key(key)
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await obstore.delete_async(self._backend, key)
        except Exception as error:
            ours = self._ours(error, "delete", key)
            if not isinstance(ours, NotFound):
                raise ours from None

    def _ours(self, error: Exception, doing: str, key: str) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, TimeoutError):
            return Unreachable(f"cannot {doing} {self._uri}/{key}: the store does not answer")
        return classify_error(error, doing=doing, where=f"{self._uri}/{key}")


async def _read(answer: Any) -> bytes:
    """The body; each part of it may take a while, the whole as long as it takes."""
    parts: list[bytes] = []
    stream = aiter(answer.stream())
    while True:
        async with asyncio.timeout(STALL_SECONDS):
            part = await anext(stream, None)
        if part is None:
            return b"".join(parts)
        parts.append(bytes(part))


def _sync(path: Path) -> None:
    """A folder store must not answer before a power cut can no longer take the object back."""
    for target, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(target, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def open_memory() -> ObstoreStore:
    """A store of this process alone, for tests."""
    return ObstoreStore(stores.MemoryStore(), "memory://")


def open_folder(address: Address, *, create: bool) -> ObstoreStore:
    """Raises `BadAddress` if the folder is not there and must not, or cannot, be made."""
    base = Path(address.bucket)
    folder = base / address.prefix
    try:
        if create:
            _make(base, folder)
        elif not folder.is_dir():
            raise BadAddress(f"there is no folder {folder}")
        return ObstoreStore(
            stores.LocalStore(folder, automatic_cleanup=True), address.uri, folder=folder
        )
    except OSError as error:
        raise classify_error(error, doing="open", where=address.uri) from None


def _make(base: Path, folder: Path) -> None:
    # A whole missing path is a mistake (a volume that is not mounted), not a wish.
    if not base.parent.is_dir():
        raise BadAddress(
            f"checkpoint.uri file://{base}: there is no folder {base.parent};"
            " mount the volume there or correct the path"
        )
    folder.mkdir(parents=True, exist_ok=True)


def open_s3(address: Address, environ: Mapping[str, str]) -> ObstoreStore:
    config, allow_http = build_s3_config(environ)
    backend = stores.S3Store(
        address.bucket,
        prefix=address.prefix or None,
        config=config,  # type: ignore[arg-type]
        client_options=_client(allow_http),
        retry_config=_RETRY,
    )
    return ObstoreStore(backend, address.uri)


def open_url(address: Address) -> ObstoreStore:
    """Google and Azure: obstore reads their variables and identities from the process itself."""
    cls = stores.GCSStore if address.scheme == "gs" else stores.AzureStore
    backend = cls(
        address.bucket,
        prefix=address.prefix or None,
        client_options=_client(False),
        retry_config=_RETRY,
    )
    return ObstoreStore(backend, address.uri)


def _client(allow_http: bool) -> Any:
    return {"allow_http": allow_http, "timeout": _TIMEOUT, "connect_timeout": timedelta(seconds=5)}
