"""Runs the lab-node: `python -m everstep_lab.kind.labnode`. See `node`."""

import asyncio
import contextlib
import logging
import os
import signal

from everstep_lab.kind.labnode import control
from everstep_lab.kind.labnode.node import LabNode, Settings


async def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = Settings.from_env(os.environ)
    settings.state.mkdir(parents=True, exist_ok=True)
    node = LabNode(settings)
    runner = await control.serve(node, settings.state / "control.sock")
    running = asyncio.create_task(node.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        await runner.cleanup()


asyncio.run(main())
