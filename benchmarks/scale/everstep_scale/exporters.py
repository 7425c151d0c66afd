"""The exporters of all nodes: pages as the lab's exporter makes them, with energy that grows."""

import time
from dataclasses import dataclass, field

from aiohttp import web

from everstep_lab.exporter.gpu import Gpu, build_gpu
from everstep_lab.exporter.render import render
from everstep_scale.listening import address_of
from everstep_scale.objects import GPUS

SAMPLE_SECONDS = 30.0
"""dcgm-exporter's own default: pages asked for in between repeat the last."""


@dataclass(slots=True)
class Exporters:
    nodes: dict[str, str]
    """Address → node."""
    asked: int = 0
    _pages: dict[str, tuple[float, str]] = field(default_factory=dict)
    _gpus: dict[str, tuple[Gpu, ...]] = field(default_factory=dict)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        return web.Response(text=self._page(self.nodes[address_of(request)]))

    def _page(self, node: str) -> str:
        now = time.monotonic()
        at, page = self._pages.get(node, (-SAMPLE_SECONDS, ""))
        if now - at >= SAMPLE_SECONDS:
            gpus = self._gpus.setdefault(node, tuple(build_gpu(0, node, i) for i in range(GPUS)))
            page = render(gpus, node=node, holders={}, now=now)
            self._pages[node] = now, page
        return page
