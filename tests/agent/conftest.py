"""Stores for the agent's tests, including a real S3 server (the lab's MinIO), and a record of all fsyncs."""

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest

from everstep_agent.storage import ObjectStore, open_store
from everstep_lab import objectstore

# A busy machine must not make a test fail.
hypothesis.settings.register_profile("everstep", deadline=None)
hypothesis.settings.load_profile("everstep")

# The stub workers use no torch, so the zygotes of agent processes import none.
os.environ["EVERSTEP_WARM"] = ""


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstore.ObjectStore]:
    with objectstore.minio(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["memory", "file", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    """One empty run on each kind of store."""
    run = f"tests/{secrets.token_hex(4)}"
    if request.param == "memory":
        yield open_store("memory://", run, {})
    elif request.param == "file":
        yield open_store(f"file://{tmp_path / 'store'}", run, {})
    else:
        server = request.getfixturevalue("s3")
        yield open_store(f"s3://{server.bucket}/prefix", run, server.environment())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fsynced paths in order, each with the name that it had at that moment."""
    found: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    return found
