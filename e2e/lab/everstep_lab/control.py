"""Requests from the command line to the supervisor: one JSON line each way over a unix socket."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from everstep_lab.seam import LabError

Answerer = Callable[[dict[str, Any]], Awaitable[Any]]
_LIMIT = 1 << 20


def ask(path: Path, request: dict[str, Any], *, timeout: float = 60.0) -> Any:
    """Send a request and return its result.

    Raises:
        LabError: no lab runs, the lab did not answer in time, or it refused (with its message).
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as reader:
                line = reader.readline()
    except (FileNotFoundError, ConnectionError):
        raise LabError("no lab is running: `everstep-lab up` starts one") from None
    except TimeoutError:
        raise LabError(f"the lab did not answer `{request['do']}` within {timeout:.0f} s") from None
    if not line:
        raise LabError(
            f"the lab ended before it answered `{request['do']}`; run `everstep-lab status`"
        )
    answer = json.loads(line)
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["ok"]


async def serve(path: Path, answer: Answerer) -> asyncio.Server:
    """Answer requests on the socket `path`. A LabError from `answer` is sent back as the error."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            request = json.loads(await reader.readline())
            try:
                reply = {"ok": await answer(request)}
            except LabError as error:
                reply = {"error": str(error)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(connected, path=str(path), limit=_LIMIT)
    os.chmod(path, 0o600)
    return server
