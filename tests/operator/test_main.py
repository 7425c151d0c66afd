"""The start of the operator's process."""

import resource
from collections.abc import Iterator

import pytest

from everstep_operator import __main__ as main


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_may_open_as_many_files_as_its_container(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps a connection to each agent."""
    most = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
    seen: list[tuple[int, int]] = []

    async def run(*_: object) -> int:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        return 0

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr("sys.argv", ["everstep-operator"])
    monkeypatch.setenv("EVERSTEP_OPERATOR_KEY", "k" * 16)
    monkeypatch.setattr(main.logs, "start", lambda _: None)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 0
    assert seen == [(most, most)]
