"""Run by `test_room.py` as root of a mount namespace. Two ranks train while one of their tiers, a small tmpfs, is full,
has no inodes, or is read-only, and then has room again. Arguments: the tier, the trouble, the expected report, an
empty folder.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from agent import gang as gangs
from agent.gang import Gang
from everstep_agent import agent
from everstep_agent.peers import incoming
from everstep_agent.pod import copier
from everstep_agent.storage import opening
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import levels
from runtime import a_paced_script

LIMIT = 60.0
FOLDERS = {"memory": "m-uid-1-1-0", "disk": "disk", "store": "store"}
AGAIN = {
    "memory": ("event=copied ", " tier=peer "),
    "disk": ("event=copied ", " tier=disk "),
    "store": ("event=committed ", ""),
}
"""What the log says when a tier accepts saves."""


def open_impatient(*given: str) -> Retrying:
    return Retrying(opening.open_raw(*given), Patience(deadline_s=1.0))  # type: ignore[arg-type]


class Mount:
    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path, self._hog = path, path / "hog"
        options = ["-t", "tmpfs", "-o", "size=4m,nr_inodes=400"]
        subprocess.run(["mount", *options, "none", str(path)], check=True)

    @contextlib.asynccontextmanager
    async def trouble(self, kind: str) -> AsyncIterator[None]:
        if kind == "read-only":
            self._remount("ro")
            yield
            self._remount("rw")
            return
        self._hog.mkdir()
        hogging = asyncio.create_task(self._take_all(kind))
        yield
        hogging.cancel()
        shutil.rmtree(self._hog)

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self._path)], check=True)

    async def _take_all(self, kind: str) -> None:
        """Take all room that becomes free, as another user of the disk might."""
        number = 0
        while True:
            try:
                number += 1
                content = b"x" * 4096 if kind == "full" else b""
                (self._hog / str(number)).write_bytes(content)
            except OSError:
                await asyncio.sleep(0.01)


def takes_saves(shown: str, tier: str) -> bool:
    return any(all(word in line for word in AGAIN[tier]) for line in shown.splitlines())


async def main(tier: str, trouble: str, told: str, folder: Path) -> None:
    gangs.STUB = a_paced_script.__file__
    agent.open_store = open_impatient  # type: ignore[assignment]
    copier.RETRY_SECONDS, incoming.RESERVE_BYTES = 0.2, 0
    mount = Mount(folder / FOLDERS[tier])
    disk = {"disk_tier": f"{folder}/disk", "disk_seconds": 0.1}
    gang = Gang(folder, 2, in_place=1, save_every_steps=10, **disk)
    async with gang:
        await gang.until(lambda s: s.committed and takes_saves(gang.shown(), tier), LIMIT)
        async with mount.trouble(trouble):
            began, at = len(gang.shown()), gang.seen.step
            await gang.until(lambda s: told in gang.shown()[began:], LIMIT)
            await gang.until(lambda s: s.step >= at + 30, LIMIT)
        began, at = len(gang.shown()), gang.seen.step
        await gang.until(lambda s: s.committed and s.committed.step > at, LIMIT)
        await gang.until(lambda s: takes_saves(gang.shown()[began:], tier), LIMIT)
        gang.want(stop=levels.Stop.SUSPEND)
        await gang.reports(LIMIT)
        assert not gang.seen.incidents, gang.seen.incidents
        assert [claim.epoch for claim in (await gang.run_log()).claims] == [1]
        found = await gang.verified()
        assert found.ok, found.problems
    print("no step stopped")


if __name__ == "__main__":
    tier, trouble, told, folder = sys.argv[1:]
    asyncio.run(main(tier, trouble, told, Path(folder)))
