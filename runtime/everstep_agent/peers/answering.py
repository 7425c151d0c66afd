"""One request to the agent's server: the proof in its head, its body, the handler, and the proven
answer.

Only `/healthz` and the nonce need no proof. Any other request without a proof is answered with 401
after at most `UNPROVEN_BYTES`.
"""

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from everstep_contract import auth, codec
from everstep_contract.http.asking import NONCE_PATH
from everstep_contract.http.channel import BODY_BYTES, UNPROVEN_BYTES, Head

SAY_SECONDS = 60.0
"""Refused requests are logged at most once in this time, with their number."""
Handler = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known once the head has been read."""

    head: Head
    exchange: auth.Exchange | None = None
    """None: not proven, or not yet (a client one minor version older signs the body itself)."""
    digest: str = ""

    @property
    def path(self) -> str:
        return self.head.words[1]

    @property
    def limit(self) -> int:
        """How many bytes of its body are read."""
        return UNPROVEN_BYTES if self.exchange is None else BODY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    proven: bool = False
    """The sender has the job's token."""
    last: bool = False
    """Close the connection after it, because the request's body was not read."""


class Answering:
    """`routes` maps a path to a coroutine from body to body; `say` logs a message."""

    def __init__(self, routes: dict[str, Handler], say: Callable[[str], object]) -> None:
        self._routes = routes
        self._say = say
        self._refused = 0
        self._said_at = float("-inf")

    def begin(self, verifier: auth.Verifier, head: Head) -> Question:
        method, path, _ = head.words
        taken = verifier.accept(method, path, head.headers)
        if taken is None:
            return Question(head=head)
        return Question(head=head, exchange=taken[0], digest=taken[1])

    def refuse_unread(self, verifier: auth.Verifier, question: Question) -> Response:
        """For a request whose body exceeds its `limit`."""
        if question.exchange is None:
            return self._refuse(verifier, last=True)
        text = f"a body of {question.head.length} bytes, the limit is {question.limit}"
        return _sign(verifier, question.exchange, 413, _document(error=text), last=True)

    async def answer(self, verifier: auth.Verifier, question: Question, body: bytes) -> Response:
        exchange = question.exchange
        if exchange is not None and auth.digest_of(body) != question.digest:
            return self._refuse(verifier)
        if exchange is None:
            open_to_all = self._answer_anyone(verifier, question)
            if open_to_all is not None:
                return open_to_all
            method, path, _ = question.head.words
            exchange = verifier.accept_as_before(method, path, question.head.headers, body)
        if exchange is None:
            return self._refuse(verifier)
        status, text = await self._handle(exchange, body)
        return _sign(verifier, exchange, status, text)

    def _answer_anyone(self, verifier: auth.Verifier, question: Question) -> Response | None:
        match question.head.words[0], question.path:
            case "GET", "/healthz":
                return Response(status=200, body=_document(ok=True))
            case "GET", path if path == NONCE_PATH:
                return Response(status=200, body=_document(nonce=verifier.nonce))
        return None

    async def _handle(self, exchange: auth.Exchange, body: bytes) -> tuple[int, bytes]:
        handler = self._routes.get(exchange.path)
        if handler is None or exchange.method != "POST":
            return 404, _document(error=f"no {exchange.method} {exchange.path}")
        try:
            return 200, await handler(body)
        except codec.DecodeError as error:
            return 400, _document(error=str(error))
        except Exception as error:  # the outer edge: one failing request must not end the agent
            what = f"{type(error).__name__}: {error}"
            self._say(
                f"{exchange.path} failed with {what}; the caller gets this error and will try again"
            )
            return 500, _document(error=what)

    def _refuse(self, verifier: auth.Verifier, *, last: bool = False) -> Response:
        self._refused += 1
        now = time.monotonic()
        if now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            self._say(
                f"{self._refused} requests without proof of the job's token were refused since "
                "this agent started; they change nothing. A NetworkPolicy can keep other "
                "pods away from this port."
            )
        text = f"unauthenticated: prove the job's token for {verifier.server} with this connection's nonce"
        headers = {auth.NONCE: verifier.nonce}
        return Response(status=401, body=_document(error=text), headers=headers, last=last)


def _sign(
    verifier: auth.Verifier,
    exchange: auth.Exchange,
    status: int,
    body: bytes,
    *,
    last: bool = False,
) -> Response:
    proof = verifier.sign(exchange, status, body)
    return Response(status=status, body=body, headers=proof, proven=True, last=last)


def _document(**fields: object) -> bytes:
    return json.dumps(fields).encode()
