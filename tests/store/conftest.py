"""A real S3 server for all tests, and a proxy in front of it for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from everstep_lab import objectstore
from store.proxy import S3Proxy


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstore.ObjectStore]:
    with objectstore.minio(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def proxy(s3: objectstore.ObjectStore) -> AsyncIterator[S3Proxy]:
    async with S3Proxy(s3.endpoint).open() as opened:
        yield opened
