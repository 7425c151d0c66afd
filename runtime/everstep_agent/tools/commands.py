"""`everstep verify | checkpoints | fork | fetch`: commands that need only a run's address."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from everstep_agent import storage
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.pin_rules import NoPin
from everstep_agent.storage.address import check_key, file_uri
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.retrying import Retrying
from everstep_agent.tools import fetch, fork, pins, verify, waits
from everstep_contract import codec


async def read(
    command: str,
    run: str,
    environ: Mapping[str, str],
    *,
    step: int | None,
    to: str,
    unpin: str,
    only: tuple[str, ...] = (),
    as_json: bool,
) -> int:
    """Run a command. Return its exit status: 0 success, 1 the check failed, 2 the command could not
    be carried out.
    """
    stores: list[Retrying] = []
    try:
        store = _open(run, environ, stores, create=False)
        async with waits.telling(stores):
            if command == "verify":
                found = await verify.verify_run(store)
                _say(as_json, _verified(found), verify.build_table(found))
                return verify.exit_code(found)
            if unpin:
                given_up = await pins.unpin(store, unpin)
                _say(as_json, given_up, pins.describe(given_up))
                return 0
            if command == "checkpoints":
                catalog = await fork.list_checkpoints(store)
                _say(as_json, catalog, fork.build_table(catalog))
                return 0
            if command == "fetch":
                fetched = await fetch.fetch_checkpoint(
                    store, _find_folder(to), step=step, only=only
                )
                _say(as_json, fetched, fetch.describe(fetched))
                return 0
            assert step is not None
            await fork.require_checkpoint(store, step)
            _check_name(to)
            target = _open(to, environ, stores, create=True)
            if target.uri == store.uri:
                raise fork.CannotFork(f"--to {to}: this is the old run: choose another address")
            forked = await fork.fork_run(store, target, step)
    except (StoreError, Broken, fork.CannotFork, fetch.NothingToFetch, NoPin, OSError) as error:
        print(f"everstep: {error}", file=sys.stderr)
        return 2
    _say(as_json, forked, f"{forked.run} starts from step {forked.step} of epoch {forked.epoch}")
    return 0


def _open(
    run: str, environ: Mapping[str, str], opened: list[Retrying], *, create: bool
) -> Retrying:
    where = run if "://" in run else file_uri(os.path.abspath(run))
    opened.append(storage.open_store(where, "", environ, create=create))
    return opened[-1]


def _check_name(to: str) -> None:
    """Raises `BadAddress` for a folder whose name no run can have; a URI is checked where it is opened."""
    if "://" not in to:
        check_key(os.path.basename(os.path.abspath(to)), "--to: the name of a run")


def _find_folder(to: str) -> Path:
    return Path(os.path.abspath(to))


def _say(as_json: bool, value: object, table: str) -> None:
    """Raises OSError if the output cannot be written. A reader that has seen enough (`| head`) is no error."""
    try:
        print(codec.dumps(value).decode() if as_json else table)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise OSError(f"cannot write its output: {error.strerror}") from None


def _verified(found: verify.Verified) -> dict[str, object]:
    """The result without the ledger's entries, because there is one for each step."""
    return {
        "run": found.run,
        "ok": found.ok,
        "problems": found.problems,
        "notes": found.notes,
        "steps": found.steps,
        "epochs": found.epochs,
        "commit": found.commit,
        "commits": found.commits,
        "bytes": found.bytes,
        "done": found.done,
    }
