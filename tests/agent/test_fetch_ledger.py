"""A pod that joins a running epoch copies the ledger from a member's agent, over a real connection."""

import asyncio
import io

from agent.a_run import entry
from everstep_agent import logline
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.peers import http
from everstep_agent.peers.client import Pool
from everstep_agent.peers.messages import LedgerCall
from everstep_agent.pod import fetch_ledger
from everstep_agent.pod.fetch_ledger import PATH, SAMPLES, LedgerFetcher
from everstep_contract import codec
from everstep_contract.http.channel import BODY_BYTES
from everstep_contract.ledger import LedgerEntry

TOKEN = "a-token"


async def copy(theirs: Book, own: Book) -> list[int]:
    """Copy a member's ledger. Returns the sizes of its answers."""
    sizes, done = list[int](), asyncio.Event()

    async def answer(body: bytes) -> bytes:
        raw = codec.dumps(fetch_ledger.answer_call(theirs, codec.loads(LedgerCall, body)))
        sizes.append(len(raw))
        return raw

    server, pool = http.Server(TOKEN, {PATH: answer}), Pool(TOKEN)
    await server.open("127.0.0.1", 0)
    fetcher = LedgerFetcher(pool, own, done.set, logline.Log(io.StringIO()))
    try:
        fetcher.ask("key", server.address)
        async with asyncio.timeout(30):
            await done.wait()
    finally:
        await fetcher.close()
        await pool.close()
        await server.close()
    return sizes


def a_book(steps: int, samples: int) -> Book:
    book = Book()
    book.add(entry(step, samples=(10**7,) * samples) for step in range(1, steps + 1))
    return book


def list_all(book: Book) -> list[LedgerEntry]:
    return book.upto(10**9)


async def test_the_ledger_is_copied_in_order_and_completely() -> None:
    theirs, own = a_book(1_200, 4), a_book(3, 1)
    assert len(await copy(theirs, own)) == 3
    assert list_all(own) == list_all(theirs)


async def test_nothing_to_copy_is_copied_at_once() -> None:
    own = a_book(3, 1)
    assert len(await copy(Book(), own)) == 1
    assert list_all(own) == []


async def test_an_answer_is_small_however_large_the_global_batch_is() -> None:
    """One of 64 MiB is refused, so a job with a batch of 16,000 samples could take no newcomer."""
    theirs, own = a_book(40, SAMPLES // 4), Book()
    sizes = await copy(theirs, own)
    assert len(sizes) == 10
    assert max(sizes) < BODY_BYTES / 50
    assert list_all(own) == list_all(theirs)


async def test_an_entry_with_more_samples_than_an_answer_is_sent_alone() -> None:
    theirs, own = a_book(2, SAMPLES + 1), Book()
    assert len(await copy(theirs, own)) == 2
    assert list_all(own) == list_all(theirs)
