"""Run by `test_tiers.py` with a tmpfs of 1 MiB as the folder, so that the tier has no room."""

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent import tier_given
from agent.tier_given import BODY, OWNER, TOKEN, NearCase, a_chunk, a_save
from everstep_agent import cli
from everstep_agent.peers import incoming
from everstep_agent.peers.client import Pool
from everstep_agent.storage.errors import StoreError

LARGE = os.urandom(2**21)
SMALL = os.urandom(1000)


async def main(kind: str, trouble: str, folder: Path) -> None:
    incoming.RESERVE_BYTES = 0
    pool = Pool(TOKEN)
    async with getattr(tier_given, kind)(folder, pool) as case:
        if kind != "store_case":
            await case.tier.keep(OWNER, [a_save(BODY, LARGE, SMALL)], 0)
        await case.tier.put(a_chunk(), BODY)
        if trouble == "read-only":
            await asyncio.to_thread(forbid_writing, folder)
        refused = SMALL if trouble == "read-only" else LARGE
        with pytest.raises((OSError, StoreError)) as found:
            await case.tier.put(a_chunk(refused), refused)
        check(found.value, trouble)
        assert await case.tier.get(a_chunk(refused)) is None
        assert await case.tier.get(a_chunk()) == BODY
        if trouble == "full":  # the chunk that did not fit must have left nothing behind
            await case.tier.put(a_chunk(SMALL), SMALL)
        if trouble == "full" and isinstance(case, NearCase):
            await asyncio.to_thread(fill_up, folder / "filler")
            await case.tier.keep(OWNER, [a_save(SMALL, step=6)], 6)
            assert set(await case.tier.list()) == {a_chunk(SMALL).digest}, "the room for its note"
    await pool.close()
    print("refused and kept")


def forbid_writing(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def fill_up(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def check(error: Exception, trouble: str) -> None:
    wanted = errno.EROFS if trouble == "read-only" else errno.ENOSPC
    assert isinstance(error, StoreError) or getattr(error, "errno", 0) == wanted, error


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    cli.leave(0)
