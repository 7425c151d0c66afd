"""The exporters of all nodes: pages of the lab's exporter, with a growing energy counter.

Only one page is rendered; the others are copies with other names. So this process uses little CPU
while the operator is measured.
"""

import time
from dataclasses import dataclass, field

from aiohttp import web

from everstep_lab.exporter.gpu import Gpu, build_gpu
from everstep_lab.exporter.load import build_load
from everstep_lab.exporter.render import render
from everstep_scale.listening import address_of
from everstep_scale.objects import GPUS

SAMPLE_SECONDS = 30.0
"""dcgm-exporter's default collect interval; scrapes in between repeat the last page."""
_NODE = "template-node"
_AT = 1e6
"""Time of the rendered page, chosen so that its energy value occurs nowhere else in the page."""


@dataclass(slots=True)
class Exporters:
    nodes: dict[str, str]
    """Address → node."""
    asked: int = 0
    _template: bytes = b""
    _pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        return web.Response(body=self.page(self.nodes[address_of(request)], time.monotonic()))

    def page(self, node: str, now: float) -> bytes:
        sample = int(now / SAMPLE_SECONDS)
        held, page = self._pages.get(node, (-1, b""))
        if held != sample:
            page = self._build(node, sample)
            self._pages[node] = sample, page
        return page

    def _build(self, node: str, sample: int) -> bytes:
        mine, others = _gpus(_NODE), _gpus(node)
        if not self._template:
            self._template = render(mine, node=_NODE, holders={}, now=_AT).encode()
        energy = str(build_load(mine[0], busy=False, now=_AT).millijoules).encode()
        page = self._template.replace(_NODE.encode(), node.encode())
        for own, other in zip(mine, others, strict=True):
            page = page.replace(own.uuid.encode(), other.uuid.encode())
        return page.replace(energy, b"%d" % (int(energy) + sample))


def _gpus(node: str) -> tuple[Gpu, ...]:
    return tuple(build_gpu(0, node, index) for index in range(GPUS))
