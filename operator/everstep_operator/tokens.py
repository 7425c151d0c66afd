"""Short-lived tokens of another ServiceAccount, so that writes appear under that account's name."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from everstep_operator import kube

LIFE_SECONDS = 3600
RENEWED_AT = 0.8
"""Share of a token's lifetime after which it is renewed; the old one is still valid if that fails.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    value: str
    renew_at: float
    """Monotonic time, like `ends_at`; counted from before the request, not by a server's clock."""
    ends_at: float


class Port(Protocol):
    """The part of `kube.Kube` that is used."""

    async def create(
        self,
        kind: kube.Kind,
        body: kube.Object,
        namespace: str | None = None,
        *,
        name: str | None = None,
        sub: str | None = None,
    ) -> kube.Object: ...


class AccountTokens:
    """Requests tokens through `port`, which needs `create` on serviceaccounts/token of that
    account.
    """

    def __init__(
        self, port: Port, where: tuple[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._clock = port, clock
        self._namespace, self._name = where
        self._held: Token | None = None
        self._turn = asyncio.Lock()

    async def current(self) -> str:
        """A valid token. Raises `kube.KubeError` if there is none."""
        async with self._turn:
            if self._held is None or self._clock() >= self._held.renew_at:
                await self._renew()
            assert self._held is not None
            return self._held.value

    def refuse(self, value: str) -> None:
        """Discard a token that the API server answered with 401; the next call requests another."""
        if self._held is not None and self._held.value == value:
            self._held = None

    async def _renew(self) -> None:
        began = self._clock()
        try:
            answer = await self._request()
        except kube.KubeError as error:
            if self._held is None or began >= self._held.ends_at:
                raise type(error)(error.status, error.reason, self._explain(error)) from error
            return
        self._held = build_token(answer, began)

    async def _request(self) -> kube.Object:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": LIFE_SECONDS},
        }
        return await self._port.create(
            kube.ACCOUNTS, body, self._namespace, name=self._name, sub="token"
        )

    def _explain(self, error: kube.KubeError) -> str:
        return (
            f"no token of ServiceAccount {self._namespace}/{self._name} (--nodes-service-account): "
            f"{error.message}"
        )


def build_token(answer: Mapping[str, Any], began: float) -> Token:
    """The server may grant another lifetime than the one requested."""
    life = float((answer.get("spec") or {}).get("expirationSeconds") or LIFE_SECONDS)
    return Token(
        value=answer["status"]["token"], renew_at=began + RENEWED_AT * life, ends_at=began + life
    )
