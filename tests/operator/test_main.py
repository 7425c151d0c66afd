"""The start of the operator's process."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator

import pytest

from everstep_operator import __main__ as main


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["everstep-operator"])
    monkeypatch.setenv("EVERSTEP_OPERATOR_KEY", "k" * 16)
    monkeypatch.setattr(main.logs, "start", lambda _: None)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_started")
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
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 0
    assert seen == [(most, most)]


@pytest.mark.usefixtures("_started", "limits")
def test_it_ends_on_sigterm_before_its_watches_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's first process ignores a signal that it has no handler for."""
    closed: list[str] = []

    async def run(*_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            closed.append("connections")
        return 0

    monkeypatch.setattr(main, "run", run)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 143
    assert closed == ["connections"]
