"""Authentication: a request and its answer each carry a proof of the job's token, which is never
sent.

A proof is an HMAC-SHA256 with the token as key. So that a recorded message cannot be replayed, it
covers the address that the client called (a request cannot be forwarded to another agent), the
server's nonce of the connection and a growing counter (no request is accepted twice), the client's
challenge (no answer is accepted twice), method, path, the digest of the body and, in an answer, its
status. The digest is in a header, so that the proof is checked before the body is read.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from everstep_contract import names
from everstep_contract.bodies import Body, list_parts

NONCE = "everstep-nonce"
COUNTER = "everstep-counter"
CHALLENGE = "everstep-challenge"
DIGEST = "everstep-digest"
PROOF = "everstep-proof"
OLD_PROOF = "everstep-mac"
"""The proof header of the previous minor version, over nonce, counter, method, path and body;
answers had no proof. It is accepted for `WANTED_PATH` only: the agents of one job have the same
version, but their operator may have another.
"""

_RANDOM = re.compile(r"[0-9a-f]{2,64}")
"""Nonces and challenges. No other form is signed, so a peer cannot choose one that changes the
meaning of a proof.
"""
_COUNTER = re.compile(r"[0-9]{1,18}")


def derive_token(operator_key: bytes, job_uid: str) -> str:
    """The job's token. The operator recomputes it when needed, so that it never has to read a
    Secret.
    """
    return hmac.new(operator_key, job_uid.encode(), hashlib.sha256).hexdigest()


def digest_of(body: Body) -> str:
    return _hash(body).hexdigest()


def _hash(body: Body) -> "hashlib._Hash":
    found = hashlib.sha256()
    for part in list_parts(body):
        found.update(part)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request on one connection, and its answer."""

    server: str
    """host:port that the client called; a server uses its own address."""
    nonce: str
    counter: int
    challenge: str
    method: str
    path: str

    def prove_question(self, token: str, digest: str) -> str:
        return self._prove(token, "question", digest)

    def prove_answer(self, token: str, status: int, digest: str) -> str:
        return self._prove(token, "answer", str(status), digest)

    def _prove(self, token: str, *words: str) -> str:
        place = (self.server, self.nonce, str(self.counter), self.challenge, self.method, self.path)
        text = "\n".join((*words, *place))
        return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def prove_as_before(token: str, exchange: Exchange, body: Body) -> str:
    """`OLD_PROOF` of a request."""
    head = f"{exchange.nonce}\n{exchange.counter}\n{exchange.method}\n{exchange.path}\n"
    signed = head.encode() + _hash(body).digest()
    return hmac.new(token.encode(), signed, hashlib.sha256).hexdigest()


class Signer:
    """The client's half of one connection to `server` (host:port)."""

    def __init__(self, token: str, server: str) -> None:
        self._token = token
        self._server = server
        self._nonce = ""
        self._counter = 0

    def begin(self, nonce: str) -> None:
        """Begin a new connection with its server's nonce. Raises ValueError if the nonce is
        malformed.
        """
        if not _RANDOM.fullmatch(nonce):
            raise ValueError(f"{nonce!r:.80} is not a nonce")
        self._nonce, self._counter = nonce, 0

    def sign(
        self, method: str, path: str, body: Body, challenge: str
    ) -> tuple[Exchange, dict[str, str]]:
        """The next request of this connection, and the headers that prove it; `challenge`: random,
        in hex.
        """
        self._counter += 1
        exchange = Exchange(
            server=self._server,
            nonce=self._nonce,
            counter=self._counter,
            challenge=challenge,
            method=method,
            path=path,
        )
        digest = digest_of(body)
        headers = {
            NONCE: exchange.nonce,
            COUNTER: str(exchange.counter),
            CHALLENGE: exchange.challenge,
            DIGEST: digest,
            PROOF: exchange.prove_question(self._token, digest),
        }
        if path == names.WANTED_PATH:
            headers[OLD_PROOF] = prove_as_before(self._token, exchange, body)
        return exchange, headers

    def believe(self, exchange: Exchange, status: int, headers: Mapping[str, str]) -> str | None:
        """The digest that the body of a proven answer must have; None: the answer is not proven."""
        digest = headers.get(DIGEST, "")
        good = exchange.prove_answer(self._token, status, digest)
        return digest if hmac.compare_digest(good.encode(), _raw(headers, PROOF)) else None


class Verifier:
    """The server's half of one connection: its own address (host:port) and nonce (random, in hex), and a counter that
    must grow.
    """

    def __init__(self, token: str, server: str, nonce: str) -> None:
        self._token = token
        self._counter = 0
        self.server = server
        self.nonce = nonce

    def accept(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[Exchange, str] | None:
        """The exchange, and the digest that the request's body must have; None: not proven."""
        exchange = self._read(method, path, headers)
        if exchange is None or not _RANDOM.fullmatch(exchange.challenge):
            return None
        digest = headers.get(DIGEST, "")
        good = exchange.prove_question(self._token, digest)
        return (exchange, digest) if self._take(exchange, good, headers, PROOF) else None

    def accept_as_before(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Exchange | None:
        """The same for a client of the previous minor version. Its proof covers the body itself, so
        the body must be read first.
        """
        exchange = self._read(method, path, headers) if path == names.WANTED_PATH else None
        if exchange is None:
            return None
        good = prove_as_before(self._token, exchange, body)
        return exchange if self._take(exchange, good, headers, OLD_PROOF) else None

    def _read(self, method: str, path: str, headers: Mapping[str, str]) -> Exchange | None:
        counter = headers.get(COUNTER, "")
        if headers.get(NONCE) != self.nonce or not _COUNTER.fullmatch(counter):
            return None
        return Exchange(
            server=self.server,
            nonce=self.nonce,
            counter=int(counter),
            challenge=headers.get(CHALLENGE, ""),
            method=method,
            path=path,
        )

    def _take(self, exchange: Exchange, good: str, headers: Mapping[str, str], name: str) -> bool:
        new = exchange.counter > self._counter
        if not new or not hmac.compare_digest(good.encode(), _raw(headers, name)):
            return False
        self._counter = exchange.counter
        return True

    def sign(self, exchange: Exchange, status: int, body: bytes) -> dict[str, str]:
        """The headers that prove an answer."""
        digest = digest_of(body)
        return {DIGEST: digest, PROOF: exchange.prove_answer(self._token, status, digest)}


def _raw(headers: Mapping[str, str], name: str) -> bytes:
    return headers.get(name, "").encode(errors="replace")
