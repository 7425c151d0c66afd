"""A command that reads a run says that it waits, if its store does not answer."""

import asyncio
import sys
from collections.abc import Callable

import pytest

from agent.unreliable import UnreliableStore
from everstep import loading
from everstep_agent.storage import open_store
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_agent.tools import commands, waits
from everstep_contract.fetched import WAITS


class HungStore(UnreliableStore):
    async def get(self, key: str) -> bytes:
        await asyncio.Event().wait()
        return b""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.01)


def a_store(kind: type[UnreliableStore], seconds: float) -> Retrying:
    store = kind(open_store("memory://", "", {}))
    store.away = kind is UnreliableStore
    return Retrying(store, Patience(deadline_s=seconds, first_s=0.01, longest_s=0.02))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Retrying], int]:
    def run(store: Retrying) -> int:
        monkeypatch.setattr("everstep_agent.storage.open_store", lambda *_, **__: store)
        return asyncio.run(
            commands.read("checkpoints", "s3://b/r", {}, step=None, to="", unpin="", as_json=True)
        )

    return run


def test_a_store_that_is_away_is_told_once_while_the_command_asks_it_again(
    read: Callable[[Retrying], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(a_store(UnreliableStore, 0.5)) == 2
    told, given_up = capsys.readouterr().err.splitlines()
    assert told.startswith(WAITS)
    assert "check the store and the network" in told
    assert given_up.startswith("everstep: ")


async def test_a_store_that_accepts_a_request_and_says_nothing_is_told_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = a_store(HungStore, 60.0)
    reading = asyncio.create_task(store.get("a"))
    said = ""
    async with waits.telling([store]):
        while not said:
            await asyncio.sleep(0)
            said = capsys.readouterr().err
    reading.cancel()
    assert said.startswith(f"{WAITS}{store.uri} has completed no request for ")


async def test_silence_is_counted_from_the_last_answer_while_calls_wait() -> None:
    inner = UnreliableStore(open_store("memory://", "", {}))
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0.02)
        found.append(store.silent_seconds)

    store = Retrying(inner, Patience(), sleep=sleep)
    inner.lost_requests = 2
    assert store.silent_seconds == 0
    await store.put("a", b"x")
    assert 0 < found[0] < found[1]
    assert store.silent_seconds == 0


def test_load_passes_on_at_once_that_the_store_does_not_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last line is the reason, and is raised instead."""
    code = (
        f"import sys; print({WAITS + 'it is away'!r}, file=sys.stderr, flush=True);"
        "print('everstep: it is gone', file=sys.stderr); print('{}'); sys.exit(2)"
    )
    found = loading._run([sys.executable, "-c", code])
    assert found == (2, ["everstep: it is gone"], b"{}\n")
    assert capfd.readouterr().err == f"{WAITS}it is away\n"
