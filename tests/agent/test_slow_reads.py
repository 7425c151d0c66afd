"""A slow connection on which data keeps arriving is not taken for a server that hangs."""

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everstep_agent.storage import obstore_store
from everstep_agent.storage.opening import open_raw

PIECE = b"x" * 2**20
PIECES = 8


class Slow(BaseHTTPRequestHandler):
    """Sends an object of 8 MiB, a MiB every tenth of a second."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(PIECES * len(PIECE)))
        self.send_header("etag", '"x"')
        self.send_header("last-modified", "Tue, 01 Jan 2030 00:00:00 GMT")
        self.end_headers()
        for _ in range(PIECES):
            time.sleep(0.1)
            self.wfile.write(PIECE)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_read_may_take_any_time_while_data_arrives(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_store, "STALL_SECONDS", 0.5)
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": address}
    store = open_raw("s3://bucket", "run", keys)
    size, found = await store.stream("chunks/a", hashlib.sha256)
    assert size == PIECES * len(PIECE)
    assert found.hexdigest() == hashlib.sha256(PIECE * PIECES).hexdigest()
