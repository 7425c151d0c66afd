"""The model accepts a spec if and only if the API server does, and both read the same values from it.

EVERSTEP_INPUT_SEED sets the seed, which is printed. EVERSTEP_INPUT_CASES sets the number of specs
in the long run.
"""

import os
import random
import time

import pytest
from hypothesis import HealthCheck, given, seed, settings

from everstep_operator import model
from input import specs
from input.api_server import ApiServer, a_document
from job_builders import a_spec

pytestmark = pytest.mark.lab

SEED = int(os.environ.get("EVERSTEP_INPUT_SEED") or random.SystemRandom().randrange(2**32))
LONG = int(os.environ.get("EVERSTEP_INPUT_CASES") or 12_000)


def parse(spec: object) -> tuple[model.JobSpec | None, str]:
    """Return what the model reads, or why it refuses to read the spec."""
    try:
        return model.parse_spec(spec), ""
    except model.SpecError as error:
        return None, f"only the model refuses: {error}"


def judge(server: ApiServer, spec: object, changed: list[specs.Path]) -> bool:
    """Return whether both accept the spec; fail if they disagree."""
    status, answer = server.ask(a_document(spec))
    assert status in (201, 400, 413, 422), answer
    read, refusal = parse(specs.as_stored(spec))
    assert (status == 201) == (read is not None), refusal or answer["message"]
    if read is None:
        named = any(str(part) in answer["message"] for path in changed for part in path if part)
        assert named or status == 400, answer["message"]
        return False
    assert model.parse_spec(answer["spec"]) == read
    return True


def run(server: ApiServer, cases: int) -> dict[bool, int]:
    found = {True: 0, False: 0}

    @seed(SEED)
    @settings(
        max_examples=cases, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip
    @given(specs.specs())
    def agree(drawn: tuple[dict[str, object], list[specs.Path]]) -> None:
        found[judge(server, *drawn)] += 1

    began = time.monotonic()
    agree()
    print(
        f"EVERSTEP_INPUT_SEED={SEED}: {found[True]} specs accepted, {found[False]} refused, "
        f"by both alike, in {time.monotonic() - began:.0f} s"
    )
    return found


def test_the_model_takes_what_the_api_server_takes_and_nothing_else(api_server: ApiServer) -> None:
    found = run(api_server, 100)
    assert min(found.values()) > 10


def test_an_unknown_field_is_refused_where_it_is_written_and_ignored_where_it_is_read(
    api_server: ApiServer,
) -> None:
    """An operator that was rolled back must accept fields of the newer version."""
    spec = {**a_spec(), "recovery": {"gangSecond": 5}}
    status, answer = api_server.ask(a_document(spec))
    assert status == 400
    assert 'unknown field "spec.recovery.gangSecond"' in answer["message"]
    assert parse(spec)[0] is not None


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_they_agree_on_thousands_of_specs(api_server: ApiServer) -> None:
    run(api_server, LONG)
