"""The start-up probe refuses a real server whose create-only PUT is not atomic."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent.gang import Gang
from everstep_agent.storage import errors, open_store, probe
from everstep_contract import report
from store.gateway import BUCKET, versitygw

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STARTS = 40


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with versitygw(tmp_path_factory.mktemp("gateway")) as environ:
        yield environ


async def test_a_gateway_whose_create_is_not_atomic_is_refused_at_every_start(
    gateway: Mapping[str, str],
) -> None:
    refused = 0
    for start in range(STARTS):
        store = open_store(f"s3://{BUCKET}", f"run-{start}", gateway)
        try:
            await probe(store)
        except errors.NoAtomicCreate:
            refused += 1
    print(f"versitygw 1.7 was refused at {refused} of {STARTS} starts")
    assert refused == STARTS


async def test_a_job_on_such_a_gateway_ends_before_its_first_step_and_says_what_it_needs(
    gateway: Mapping[str, str], tmp_path: Path
) -> None:
    gang = Gang(tmp_path, uri=f"s3://{BUCKET}/jobs")
    gang.stub |= gateway
    async with gang:
        ends = await gang.reports(60)
    told = [r.message for r in ends.values() if r.cause is report.Cause.STORE]
    assert told
    assert all(
        "needs a store whose create-only PUT (If-None-Match: *) is atomic" in m for m in told
    )
    assert gang.seen.step == 0
