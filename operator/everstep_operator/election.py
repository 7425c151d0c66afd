"""The Lease: take it, renew it, stop when it is lost, release it at the end.

`seconds_left` is the gate of every write (see `kube.Kube`): it closes at the renew deadline,
whatever the loop below is doing.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from everstep_operator import kube, lease
from everstep_operator.kube import Kube
from everstep_operator.lease import Lease, Sighting, Timing

ATTEMPT_SECONDS = 5.0
RELEASE_SECONDS = 3.0

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another replica may act from now on; the text names the lease and the reason."""


class Leadership(Protocol):
    """Whether this process acts."""

    leading: asyncio.Event

    @property
    def beat(self) -> float:
        """Monotonic time of the loop's last turn."""

    def seconds_left(self) -> float:
        """How long writes may continue without another renewal; 0 or less: not at all."""

    async def run(self) -> None: ...

    async def seize(self) -> None:
        """Take the Lease from its holder; return when that holder can no longer write."""

    async def release(self) -> None: ...


class Alone:
    """No election: a single replica, which always acts."""

    def __init__(self) -> None:
        self.leading = asyncio.Event()
        self.leading.set()

    @property
    def beat(self) -> float:
        return time.monotonic()

    def seconds_left(self) -> float:
        return math.inf

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def seize(self) -> None:
        return

    async def release(self) -> None:
        return


class Elector:
    """`port` must have no gate: this class opens the gates of the other ports."""

    def __init__(
        self,
        port: Kube,
        where: tuple[str, str],
        me: str,
        timing: Timing,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,  # noqa: TID251 what people read in the Lease
    ) -> None:
        self._port, self._me, self._timing = port, me, timing
        self._namespace, self._name = where
        self._clock, self._wall = clock, wall
        self._sighting: Sighting | None = None
        self._valid_until = -math.inf
        self._trouble = ""
        self._said = ""
        self.leading = asyncio.Event()
        self.beat = time.monotonic()

    def seconds_left(self) -> float:
        return self._valid_until - self._clock()

    async def run(self) -> None:
        """Renew the Lease, or wait for it. Never returns; raises `LeaseLost`."""
        while True:
            self.beat = time.monotonic()
            await self.turn()
            pause = self._timing.retry
            await asyncio.sleep(min(pause, self.seconds_left()) if self.leading.is_set() else pause)

    async def turn(self) -> None:
        limit = min(ATTEMPT_SECONDS, self.seconds_left()) if self.leading.is_set() else None
        try:
            async with asyncio.timeout(limit or ATTEMPT_SECONDS):
                await self._try()
        except TimeoutError:
            self._note_trouble("the API server did not answer in time")
        except kube.KubeError as error:
            self._note_trouble(f"{type(error).__name__}: {error.message}")
        if self.leading.is_set() and self.seconds_left() <= 0:
            text = f"not renewed for {self._timing.renew:.0f} s"
            raise self._lost(f"{text} ({self._trouble or 'this process did not run'})")

    async def _try(self) -> None:
        began = self._clock()
        self._sighting = lease.build_sighting(self._sighting, await self._read(), began)
        decision = lease.decide_lease(self._sighting, self._me, began)
        match decision:
            case lease.Wait(holder=holder):
                if self.leading.is_set():
                    raise self._lost(f"{holder} has taken it")
                self._say(f"{holder} holds lease {self._shown}: standing by")
            case _:
                await self._write(self._sighting.lease, began)
                if isinstance(decision, lease.Take):
                    self._say(f"lease {self._shown} taken as {self._me}: {decision.reason}")
                self._trouble = ""
                self.leading.set()

    async def _read(self) -> Lease | None:
        try:
            return lease.to_lease(await self._port.get(kube.LEASES, self._name, self._namespace))
        except kube.Gone:
            return None

    async def _write(self, old: Lease | None, began: float) -> None:
        """Write the Lease. Its time counts from before the request: the answer may be late."""
        seconds, now = self._timing.lease, self._wall()
        body = lease.build_held(self._name, self._namespace, old, self._me, seconds, now)
        written = await put_lease(self._port, body)
        self._sighting = lease.build_sighting(self._sighting, written, began)
        self._valid_until = began + self._timing.renew

    async def seize(self) -> None:
        """Take the Lease from its holder. Raises `kube.KubeError`.

        The former holder stops when it reads the Lease, or at its deadline at the latest. The wait
        assumes that its timing is the same as this process's.
        """
        began = self._clock()
        while not self.leading.is_set():
            old, began = await self._read(), self._clock()
            self._sighting = lease.build_sighting(self._sighting, old, began)
            try:
                await self._write(old, began)
            except (kube.Conflict, kube.AlreadyExists):
                continue
            except kube.Denied:
                if old is not None:
                    raise
                self._valid_until = math.inf
                log.info("there is no lease %s: no operator has ever acted", self._shown)
            self.leading.set()
            if old is not None and old.holder:
                log.info("lease %s taken from %s; it has to stop first", self._shown, old.holder)
                await self._outlast(began)

    async def _outlast(self, began: float) -> None:
        until = began + self._timing.renew
        while (left := until - self._clock()) > 0:
            await asyncio.sleep(min(left, self._timing.retry))
            await self.turn()

    def _lost(self, why: str) -> LeaseLost:
        self._valid_until = -math.inf
        return LeaseLost(f"lease {self._shown} is lost: {why}. Nothing is written any more")

    async def release(self) -> None:
        """Release the Lease, so that another replica need not wait for its expiry. Best effort."""
        held = self._sighting.lease if self._sighting else None
        mine = self.leading.is_set() and self.seconds_left() > 0
        self._valid_until = -math.inf
        if not mine or held is None:
            return
        body = lease.build_released(self._name, self._namespace, held, self._wall())
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await put_lease(self._port, body)
            log.info("lease %s released", self._shown)
        except (TimeoutError, kube.KubeError) as error:
            log.warning("lease %s not released: %s", self._shown, error)

    @property
    def _shown(self) -> str:
        return f"{self._namespace}/{self._name}"

    def _note_trouble(self, text: str) -> None:
        if text != self._trouble:
            log.warning("lease %s: %s", self._shown, text)
        self._trouble = text

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.info("%s", text)


async def put_lease(port: Kube, body: kube.Object) -> Lease:
    """Create or replace the Lease.

    Raises `kube.Conflict` if the version in `body` is no longer the newest.
    """
    metadata = body["metadata"]
    if "resourceVersion" not in metadata:
        return lease.to_lease(await port.create(kube.LEASES, body, metadata["namespace"]))
    where = metadata["name"], metadata["namespace"]
    return lease.to_lease(await port.replace(kube.LEASES, *where, body))
