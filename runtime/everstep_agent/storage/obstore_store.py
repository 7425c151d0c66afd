"""The only file that uses obstore: folders, S3, Google Cloud Storage, Azure, memory."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import store as stores
from obstore.exceptions import BaseError

from everstep_agent import aside
from everstep_agent.storage import folder as folders
from everstep_agent.storage.address import GIVEN, Address, build_s3_config, check_key
from everstep_agent.storage.errors import (
    AlreadyExists,
    BadAddress,
    NotFound,
    StoreError,
    TooLarge,
    Unreachable,
    classify_error,
    hide_secrets,
)
from everstep_agent.storage.store import SLOWEST, S, Sink

_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
"""Retries are made by `retrying.Retrying`, where they can be seen and reported."""
_TIMEOUT = timedelta(seconds=150)
"""Limit of one request: a 64 MiB chunk at `SLOWEST`, and the wait for the first byte."""
STALL_SECONDS = 15.0
"""If a server has sent nothing for this long, the request is given up and repeated."""
LIMIT_BYTES = 1024**3
"""Limit for the size of an object that is read. Chunks have at most 64 MiB; a ledger or a manifest
may have more.
"""
FOLDER_THREADS = 8
Runner = Callable[..., Awaitable[Any]]
"""Calls a function in another thread."""
R = TypeVar("R")


class FolderThreads:
    """Threads of a folder's own, so that one that hangs (NFS) takes no thread from anything else,
    such as copies of saves to other pods.
    """

    def __init__(self) -> None:
        self._access = ThreadPoolExecutor(FOLDER_THREADS, "everstep-folder")
        self._aside = aside.open_threads("everstep-folder-aside")

    async def run(self, work: Callable[..., R], *args: object, **more: object) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._access, partial(work, *args, **more))

    async def run_aside(self, work: Callable[..., R], *args: object) -> R:
        """As `aside.run`."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work, *args)


class ObstoreStore:
    def __init__(self, backend: Any, uri: str, *, folder: Path | None = None) -> None:
        self._backend = backend
        self._uri = uri
        self._folder = folder
        self._threads = FolderThreads()
        self._swept = time.monotonic()

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
            if self._folder is None:
                await self._put(key, body, mode)
            else:
                await self._write_file(self._folder, key, body, mode)
        except Exception as error:
            raise self._ours(error, "write", key) from None

    async def _put(self, key: str, body: bytes | memoryview, mode: Any) -> None:
        # One PUT, never a multipart upload: only a single PUT can be create-only.
        async with asyncio.timeout(STALL_SECONDS + len(body) / SLOWEST):
            await obstore.put_async(self._backend, key, body, mode=mode, use_multipart=False)

    async def _write_file(self, root: Path, key: str, body: bytes | memoryview, mode: Any) -> None:
        await self._sweep(root)
        staged = folders.staging_key()
        # Not "create", for which obstore needs a hard link, too, and whose error does not say so.
        await self._put(staged, body, "overwrite")
        replace = mode == "overwrite"
        try:
            done = await self._threads.run(folders.publish, root, staged, key, replace=replace)
        except FileNotFoundError:
            raise Unreachable(f"cannot write {self._uri}/{key}: its folder was removed") from None
        if not done:
            raise AlreadyExists(f"cannot write {self._uri}/{key}: it exists")

    async def _sweep(self, root: Path) -> None:
        """Delete leftovers from time to time, because other writers may be killed at any time."""
        now = time.monotonic()
        if now - self._swept > folders.STALE_SECONDS:
            self._swept = now
            await self._threads.run(folders.sweep, root)

    async def get(self, key: str) -> bytes:
        check_key(key)
        try:
            if self._folder is not None:
                return await self._read_file(self._folder / key, key)
            async with asyncio.timeout(STALL_SECONDS):
                answer = await obstore.get_async(self._backend, key)
            self._require_size(key, answer.meta["size"])
            return await _read(answer)
        except Exception as error:
            raise self._ours(error, "read", key) from None

    async def _read_file(self, path: Path, key: str) -> bytes:
        """obstore would read 8 KiB at a time, each in another thread: four times the CPU time."""
        async with asyncio.timeout(STALL_SECONDS):
            size = await self._threads.run(folders.measure, path)
        self._require_size(key, size)
        async with asyncio.timeout(STALL_SECONDS + size / SLOWEST):
            return await self._threads.run(path.read_bytes)

    async def stream(
        self, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        check_key(key)
        sink = begin()
        try:
            if self._folder is not None:
                run = self._threads.run if urgent else self._threads.run_aside
                return await self._stream_file(self._folder / key, key, sink, run), sink
            async with asyncio.timeout(STALL_SECONDS):
                answer = await obstore.get_async(self._backend, key)
            self._require_size(key, answer.meta["size"])
            return await _stream(answer, sink, asyncio.to_thread if urgent else aside.run), sink
        except Exception as error:
            raise self._ours(error, "read", key) from None

    async def _stream_file(self, path: Path, key: str, sink: Sink, run: Runner) -> int:
        async with asyncio.timeout(STALL_SECONDS):
            size = await self._threads.run(folders.measure, path)
        self._require_size(key, size)
        async with asyncio.timeout(STALL_SECONDS + size / SLOWEST):
            return int(await run(folders.stream_file, path, sink))

    def _require_size(self, key: str, size: int) -> None:
        if size > LIMIT_BYTES:
            raise TooLarge(f"{self._uri}/{key} has {size} bytes: it is not an object of Everstep")

    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        found: list[str] = []
        try:
            pages = obstore.list(
                self._backend, prefix or None, offset=after or None, chunk_size=1000
            )
            async for page in _limited(pages):
                found += [m["path"] for m in page if not folders.is_staging(m["path"])]
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
    """The body."""
    parts = answer.stream(min_chunk_size=folders.PIECE_BYTES)
    return b"".join([bytes(part) async for part in _limited(parts)])


async def _stream(answer: Any, sink: Sink, run: Runner) -> int:
    """Feed the body to `sink`; returns its size in bytes."""
    size = 0
    # obstore's own size, 10 MiB, takes a slow connection longer than the limit of a part.
    async for part in _limited(answer.stream(min_chunk_size=folders.PIECE_BYTES)):
        # Not released here, because the thread may still read it after a cancellation.
        piece = memoryview(part)
        await run(sink.update, piece)
        size += len(piece)
    return size


async def _limited(stream: Any) -> AsyncIterator[Any]:
    """Each part of a stream has a time limit, the whole stream has none. Raises `TimeoutError`."""
    parts = aiter(stream)
    while True:
        async with asyncio.timeout(STALL_SECONDS):
            part = await anext(parts, None)
        if part is None:
            return
        yield part


def open_memory() -> ObstoreStore:
    """A store in this process only, for tests."""
    return ObstoreStore(stores.MemoryStore(), "memory://")


def open_folder(address: Address, *, create: bool) -> ObstoreStore:
    """Raises `BadAddress` if the folder does not exist and may not, or cannot, be created."""
    base = Path(address.bucket)
    folder = base / address.prefix
    try:
        if create:
            _require_parent(base)
            folders.make(base, folder)
            # A folder that is full or read-only can be read, and later perhaps written to.
            with contextlib.suppress(OSError):
                folders.sweep(folder)
        elif not folder.is_dir():
            obstacle = folders.describe_obstacle(folder)
            raise BadAddress(f"there is no folder {folder}{obstacle and f': {obstacle}'}")
        return ObstoreStore(
            stores.LocalStore(folder, automatic_cleanup=True), address.uri, folder=folder
        )
    except OSError as error:
        if obstacle := folders.describe_obstacle(folder):
            raise BadAddress(
                f"cannot open {address.uri}: {obstacle}; correct that, or choose another run"
            ) from None
        raise classify_error(error, doing="open", where=address.uri) from None


def _require_parent(base: Path) -> None:
    # If even the parent folder is missing, the path is a mistake (a volume that is not mounted).
    if not base.parent.is_dir():
        obstacle = folders.describe_obstacle(base.parent)
        raise BadAddress(
            f"{GIVEN} file://{base}: {obstacle or f'there is no folder {base.parent}'};"
            " mount the volume there or correct the path"
        )


def open_s3(address: Address, environ: Mapping[str, str]) -> ObstoreStore:
    config, allow_http = build_s3_config(environ)
    with _naming(address, "correct the AWS_… variables"):
        backend = stores.S3Store(
            address.bucket,
            prefix=address.prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options=_client(allow_http),
            retry_config=_RETRY,
        )
    return ObstoreStore(backend, address.uri)


def open_url(address: Address) -> ObstoreStore:
    """Google and Azure: obstore itself reads their variables and identities from the process
    environment.
    """
    cls, fix = _URL_STORES[address.scheme]
    with _naming(address, fix):
        backend = cls(
            address.bucket,
            prefix=address.prefix or None,
            client_options=_client(False),
            retry_config=_RETRY,
        )
    return ObstoreStore(backend, address.uri)


_URL_STORES: dict[str, tuple[Any, str]] = {
    "gs": (stores.GCSStore, "correct GOOGLE_APPLICATION_CREDENTIALS"),
    "az": (stores.AzureStore, "set AZURE_STORAGE_ACCOUNT_NAME, and a key or an identity"),
}


@contextlib.contextmanager
def _naming(address: Address, fix: str) -> Iterator[None]:
    """Raise `BadAddress` for settings with which no store can be opened."""
    try:
        yield
    except BaseError as error:
        text = str(error).split("Debug source")[0]
        said = hide_secrets(" ".join(text.split()))[:300]
        raise BadAddress(f"cannot open {address.uri}: {said}; {fix}") from None


def _client(allow_http: bool) -> Any:
    return {"allow_http": allow_http, "timeout": _TIMEOUT, "connect_timeout": timedelta(seconds=5)}
