"""Who may speak to an agent. The token itself never crosses the wire."""

import hashlib
import hmac
from collections.abc import Mapping

HEADER_NONCE = "Everstep-Nonce"
HEADER_COUNTER = "Everstep-Counter"
HEADER_MAC = "Everstep-Mac"


def derive_token(operator_key: bytes, job_uid: str) -> str:
    """The job's token: recomputed by the operator at need, so that it never has to read a Secret."""
    return hmac.new(operator_key, job_uid.encode(), hashlib.sha256).hexdigest()


def sign(token: str, *, nonce: str, counter: int, method: str, path: str, body: bytes) -> str:
    """HMAC-SHA256 over the server's nonce of this connection, a growing counter and the request."""
    head = f"{nonce}\n{counter}\n{method.upper()}\n{path}\n".encode()
    return hmac.new(
        token.encode(), head + hashlib.sha256(body).digest(), hashlib.sha256
    ).hexdigest()


def verify(
    token: str, mac: str, *, nonce: str, counter: int, method: str, path: str, body: bytes
) -> bool:
    good = sign(token, nonce=nonce, counter=counter, method=method, path=path, body=body)
    return hmac.compare_digest(good, mac)


class Signer:
    """The client's half for one connection: give it the server's nonce, take headers for each request.

    A server answers 401 with `HEADER_NONCE` when the nonce is not that of this connection (it was re-opened): call
    `renew` with it and send the request again.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = ""
        self._counter = 0

    def renew(self, nonce: str) -> None:
        self._nonce, self._counter = nonce, 0

    def headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        self._counter += 1
        mac = sign(
            self._token,
            nonce=self._nonce,
            counter=self._counter,
            method=method,
            path=path,
            body=body,
        )
        return {HEADER_NONCE: self._nonce, HEADER_COUNTER: str(self._counter), HEADER_MAC: mac}


class Verifier:
    """The server's half for one connection: its own nonce, a counter that must grow, no request twice."""

    def __init__(self, token: str, nonce: str) -> None:
        self._token = token
        self.nonce = nonce
        self._counter = 0

    def accepts(self, headers: Mapping[str, str], method: str, path: str, body: bytes) -> bool:
        counter = headers.get(HEADER_COUNTER, "")
        if (
            headers.get(HEADER_NONCE) != self.nonce
            or not counter.isascii()
            or not counter.isdigit()
        ):
            return False
        if int(counter) <= self._counter:
            return False
        good = verify(
            self._token, headers.get(HEADER_MAC, ""),
            nonce=self.nonce, counter=int(counter), method=method, path=path, body=body,
        )  # fmt: skip
        if good:
            self._counter = int(counter)
        return good
