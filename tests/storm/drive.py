"""Plays one storm in its own namespaces.

Usage: `python -m storm.drive FOLDER --seed N --rounds N [--brief]`.

Leaves in FOLDER what the witness reads: the workers' `records/`, `journal.jsonl`, and the store's
`objects/`. Exit status 0 means that the job was done. The witness decides whether the result is
right.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
from obstore.store import S3Store

from everstep_lab import build, objectstore
from storm import faults, ground, plan
from storm.cluster import Cluster, Failed, Journal
from storm.ground import Gate, Ground
from storm.pods import WORKER, Training

COUNT = 3
TORCH = WORKER.with_name("torch_worker.py")
TORCH_STEPS = 80
STARTUP_SECONDS, TORCH_STARTUP_SECONDS = 30.0, 120.0
"""How long a worker may take to start and restore. A worker that is stopped meanwhile counts as hung
after this time.
"""
RECOVERED_SECONDS = 120.0
DONE_SECONDS = 180.0
AHEAD = 60
"""Steps between the end of the storm and the end of the run."""


async def play(arguments: argparse.Namespace, server: objectstore.ObjectStore) -> None:
    """Play the storm. Raises Failed."""
    folder: Path = arguments.folder
    field, gate = Ground(), Gate((server.ip, server.port))
    environ = server.environment() | {"AWS_ENDPOINT_URL": await gate.open()}
    journal = Journal(folder / "journal.jsonl")
    training = build_training(arguments, environ)
    try:
        async with Cluster(training, COUNT, field, journal) as cluster:
            sky = faults.Sky(cluster, gate)
            for strikes in draw(arguments):
                await _round(sky, strikes)
            end_at(folder, cluster.seen.step + AHEAD)
            await cluster.until(lambda _: cluster.is_done, DONE_SECONDS, "the job is done")
            journal.write("done")
    finally:
        await gate.close()
        field.close()


def draw(arguments: argparse.Namespace) -> tuple[plan.Round, ...]:
    kinds = plan.BRIEF if arguments.brief else plan.KINDS
    return plan.draw(arguments.seed, COUNT, arguments.rounds, kinds)


async def _round(sky: faults.Sky, strikes: plan.Round) -> None:
    cluster = sky.cluster
    await cluster.until(cluster.steps_on, RECOVERED_SECONDS, "the job runs before the round")
    async with asyncio.TaskGroup() as tasks:
        for strike in strikes:
            tasks.create_task(faults.strike(sky, strike))
    step = cluster.seen.step
    await cluster.until(
        lambda s: cluster.steps_on(s) and s.step > step + 2,
        RECOVERED_SECONDS,
        f"new steps after {[s.kind for s in strikes]}",
    )
    cluster.journal.write("recovered", step=cluster.seen.step)


def build_training(arguments: argparse.Namespace, environ: dict[str, str]) -> Training:
    folder: Path = arguments.folder
    (folder / "records").mkdir()
    stub = {
        "STUB_STEP_MS": "40",
        "STORM_STEPS": str(TORCH_STEPS),
        "GLOO_SOCKET_IFNAME": "eth0",
        "STORM_SEED": str(arguments.seed),
        "STORM_RECORDS": str(folder / "records"),
        "STORM_END": str(folder / "end"),
        "STUB_UNTIL": str(10**9),
    }
    if not arguments.torch:
        stub["EVERSTEP_WARM"] = ""  # the worker imports no torch, so its zygote need not
    script = TORCH if arguments.torch else WORKER
    settings = {
        "uri": f"s3://{objectstore.BUCKET}/storm",
        "grace_seconds": 15.0,
        "startup_seconds": TORCH_STARTUP_SECONDS if arguments.torch else STARTUP_SECONDS,
    }
    return Training(folder=folder, environ=environ | stub, settings=settings, script=script)


def end_at(folder: Path, step: int) -> None:
    part = folder / "end.part"
    part.write_text(str(step))
    part.rename(folder / "end")


def copy_objects(server: objectstore.ObjectStore, folder: Path) -> None:
    """Copy every object of the run with a reader that is not part of Everstep."""
    given = server.environment()
    store = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        region=server.region,
        access_key_id=given["AWS_ACCESS_KEY_ID"],
        secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    prefix = "storm/ns/job/"
    for batch in obstore.list(store, prefix):
        for found in batch:
            target = folder / "objects" / found["path"].removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(bytes(obstore.get(store, found["path"]).bytes()))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[objectstore.ObjectStore]:
    """Run the lab's S3 server; loopback must be up."""
    folder.mkdir()
    with objectstore.minio(folder) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--brief", action="store_true", help="no fault that lasts longer than a limit"
    )
    parser.add_argument("--torch", action="store_true", help=f"real ranks, {TORCH_STEPS} steps")
    arguments = parser.parse_args()
    build.ensure(build.OBJECT_STORE)
    ground.ip("link", "set", "lo", "up")
    with serving(arguments.folder / "s3") as server:
        try:
            asyncio.run(play(arguments, server))
        except ExceptionGroup as errors:
            expected, others = errors.split((Failed, AssertionError))
            if others is not None:
                raise
            print("\n".join(repr(e) for e in expected.exceptions), file=sys.stderr)
            return 1
        except (Failed, AssertionError) as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            copy_objects(server, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
