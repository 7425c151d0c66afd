"""Reads one committed manifest and verifies that it is the one that was committed."""

import asyncio
import functools
import hashlib

from everstep_agent.storage.errors import BadAddress, NotFound, TooLarge
from everstep_agent.storage.store import DAMAGED_READS, ObjectStore
from everstep_contract import codec
from everstep_contract import manifest as manifests
from everstep_contract.log import Commit
from everstep_contract.manifest import Manifest


class Broken(Exception):
    """A committed checkpoint cannot be used; the message names the part and the reason."""


async def fetch_manifest(store: ObjectStore, commit: Commit) -> Manifest:
    """Raises `Broken` if the manifest is missing, changed or in an unknown format, `StoreError` if
    the store cannot be read.
    """
    problem = Broken(f"{commit.manifest} is gone")
    for _ in range(DAMAGED_READS):
        try:
            return await read_manifest(commit, await store.get(commit.manifest))
        except NotFound:
            break
        except (BadAddress, TooLarge) as error:
            raise Broken(str(error)) from None
        except Broken as error:
            problem = error
    raise problem


async def read_manifest(commit: Commit, raw: bytes) -> Manifest:
    """Raises `Broken` if `raw` is not what was committed, or in an unknown format."""
    return await asyncio.to_thread(_read, commit, raw)


def _read(commit: Commit, raw: bytes) -> Manifest:
    digest = hashlib.sha256(raw).hexdigest()
    if digest != commit.digest:
        text = f"SHA-256 {digest[:12]}…, committed {commit.digest[:12]}…"
        raise Broken(f"{commit.manifest} was changed: {text}")
    try:
        manifest = _decode(raw)
    except codec.DecodeError as error:
        raise Broken(f"{commit.manifest}: {error}") from None
    if (manifest.epoch, manifest.step) != (commit.epoch, commit.step):
        raise Broken(f"{commit.manifest} is of epoch {manifest.epoch} step {manifest.step}")
    return manifest


_decode = functools.lru_cache(maxsize=1)(manifests.decode)
"""Cached, because decoding takes 23 µs per tensor, and an agent that restores a checkpoint has
usually read its manifest before.
"""
