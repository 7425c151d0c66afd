"""Serves one node's page as dcgm-exporter does, and can fail in the same ways.

The page is rendered once per collect interval; scrapes in between get the same page. Its pod labels
are those of the previous collect: the real exporter also sees an allocation one sample late.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from everstep_lab.exporter.gpu import Gpu
from everstep_lab.exporter.render import Holder, Options, render

PORT = 9400
MODES = ("ok", "refused", "hang", "http500", "empty", "frozen")
"""Modes of the server. `refused` closes the listening socket."""

Holders = Mapping[str, Holder]


class ExporterServer:
    """`gpus` and `holders` are called at each collect. `clock` (seconds) is that of `Gpu.xids`."""

    def __init__(
        self,
        node: str,
        *,
        gpus: Callable[[], Sequence[Gpu]],
        holders: Callable[[], Holders],
        clock: Callable[[], float],
        options: Options | None = None,
    ) -> None:
        self._node = node
        self._gpus = gpus
        self._holders = holders
        self._clock = clock
        self._options = options or Options()
        self._known: Holders = {}
        self._page = ""
        self._runner: web.AppRunner | None = None
        self._address: tuple[str, int] = ("127.0.0.1", PORT)
        self.mode = "ok"
        self.listening = asyncio.Event()

    @property
    def page(self) -> str:
        return self._page

    def collect(self) -> None:
        """Take one sample. In the mode `frozen`, keep the previous page instead."""
        if self.mode == "frozen":
            return
        self._page = render(
            self._gpus(), node=self._node, holders=self._known, now=self._clock(),
            options=self._options,
        )  # fmt: skip
        self._known = dict(self._holders())

    async def run(self, host: str, port: int = PORT, *, interval: float = 1.0) -> None:
        """Listen and collect until cancelled."""
        self._address = (host, port)
        try:
            self.collect()
            await self.set_mode(self.mode)
            while True:
                await asyncio.sleep(interval)
                self.collect()
        finally:
            await self._close()

    def restart(self) -> None:
        """Reset the mode and forget the pod labels, which reappear at the second collect."""
        self.mode = "ok"
        self._known = {}

    async def set_mode(self, mode: str) -> None:
        self.mode = mode
        if mode == "refused":
            await self._close()
        elif self._runner is None:
            await self._listen()

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, *self._address, reuse_address=True).start()
        self._runner = runner
        self.listening.set()

    async def _close(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            self.listening.clear()
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        match self.mode:
            case "hang":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                return web.Response(status=503)
            case "http500":
                return web.Response(
                    status=500, text="Failed to read metrics: could not get metrics\n"
                )
            case "empty":
                return web.Response(text="")
            case _:
                return web.Response(
                    text=self._page, headers={"Content-Type": "text/plain; charset=utf-8"}
                )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="KO" if self.mode in ("http500", "empty") else "OK")
