"""A real S3 server whose create-only PUT is not atomic: versitygw 1.7, which serves a folder on
loopback.
"""

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep_lab import build, places, procs

BUCKET = "everstep"
MODULE = build.Module(
    folder=Path(__file__).parent / "gateway",
    title="versitygw v1.7.0",
    binaries=("versitygw",),
    ldflags="-s -w",
    renamed={},
    cold_seconds=120.0,
)
_READY_SECONDS = 60.0


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run the server; yield the environment variables that S3 clients expect. Data and log stay in
    `folder`.
    """
    binary = build.ensure(MODULE) / "versitygw"
    (folder / "objects" / BUCKET).mkdir(parents=True)
    (folder / "metadata").mkdir()
    port = places.choose_port("127.0.0.1", 0)
    access, secret = "everstep-test", secrets.token_hex(16)
    argv = [
        str(binary), "--port", f"127.0.0.1:{port}", "--quiet",
        "posix", "--sidecar", str(folder / "metadata"), str(folder / "objects"),
    ]  # fmt: skip
    env = {"ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret}
    log = folder / "versitygw.log"
    process = procs.spawn(argv, log=log, mark=folder, env=env)
    try:
        _wait(port, log)
        yield {
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        procs.stop(process)


def _wait(port: int, log: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise AssertionError(
                    f"versitygw did not start to serve:\n{procs.tail(log)}"
                ) from None
            time.sleep(0.05)
        else:
            return
