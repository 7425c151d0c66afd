"""Loads a checkpoint as plain tensors, in any script or notebook.

The `everstep` command fetches it in a separate process: this package does not access stores, and a
notebook has an event loop already. The reader is the one that workers use.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from everstep import state, validate
from everstep.checkpoint_reader import Checkpoint
from everstep.errors import Misuse, StateError
from everstep_contract import codec
from everstep_contract.fetched import WAITS, Fetched

TRIES = 3
"""From a folder, chunks are read where they are, so the job may retire the checkpoint meanwhile.
Then the newest one is fetched again.
"""


class Loaded(dict[str, Any]):
    """Maps each name in `job.track` to what the object's `load_state_dict` takes, or to the tensor
    if a tensor was tracked. All tensors are full tensors on the CPU. An optimizer's parameters are
    numbered in the order in which it held them, as in torch.
    """

    def __init__(self, objects: dict[str, Any], found: Fetched) -> None:
        super().__init__(objects)
        self.step, self.epoch, self.run = found.step, found.epoch, found.run


def load(uri: str, *, step: int | None = None, only: Iterable[str] = ()) -> Loaded:
    """Load a checkpoint of a run, whatever ranks and mesh saved it. No agent is needed.

    Args:
        uri: address of the run, STORE/NAME. STORE is a folder, or begins with `file://`, `s3://`,
            `gs://` or `az://`. Keys and endpoint come from the environment, as for `everstep run`.
        step: step of the checkpoint; None: the newest one that can be read. A warning names newer
            ones that cannot.
        only: names of the tracked objects to load; none: all. The others are not fetched.

    It takes as much memory as the objects. If the store is not a folder, it also needs as much room
    in the folder for temporary files (`TMPDIR`) until it returns.

    Raises:
        Misuse: an argument cannot be used.
        StateError: there is no such run, checkpoint or object, or a part of it is damaged or cannot
            be read; the message says which.
    """
    names = _check(uri, step, only)
    for left in reversed(range(TRIES)):
        with tempfile.TemporaryDirectory(prefix="everstep-load-") as folder:
            found = _fetch(str(uri), step, names, folder)
            checkpoint = Checkpoint(found.manifest, found.places)
            try:
                trees = checkpoint.tree["objects"]
                objects = {n: _read(trees[n], checkpoint) for n in trees if not names or n in names}
                break
            except StateError:
                if not (left and checkpoint.lacks_files()):
                    raise
    for skipped in found.skipped:
        text = f"{found.run}: the checkpoint of step {skipped.step} is passed over: {skipped.why}"
        warnings.warn(text, stacklevel=2)
    return Loaded(objects, found)


def _check(uri: object, step: object, only: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(uri, (str, os.PathLike)):
        raise Misuse(f"everstep.load({uri!r:.80}): give the address of a run, STORE/NAME")
    if step is not None:
        validate.whole("everstep.load: step", step, 0)
    if isinstance(only, str):
        raise Misuse(f"everstep.load: only={only!r} is a text; write only=[{only!r}]")
    names = tuple(only) if isinstance(only, Iterable) else (only,)
    if not all(isinstance(name, str) for name in names):
        raise Misuse(f"everstep.load: only={only!r:.80}: give a list of names, [] for all objects")
    return names


def _fetch(uri: str, step: int | None, only: tuple[str, ...], folder: str) -> Fetched:
    # -P: a file of the current folder, such as `queue.py`, must not replace a module of Python.
    program = [sys.executable, "-P", "-m", "everstep_agent.cli"]
    command = [*program, "fetch", uri, "--to", folder, "--json"]
    command += [] if step is None else ["--step", str(step)]
    command += [part for name in only for part in ("--only", name)]
    status, said, answer = _run(command)
    if status:
        why = said[-1] if said else f"it ended with status {status}"
        raise StateError(f"everstep.load: {why.removeprefix('everstep: ')}")
    return codec.loads(Fetched, answer)


def _run(command: Sequence[str]) -> tuple[int, list[str], bytes]:
    """Exit status, lines of stderr, and stdout. That the store does not answer is passed on at once."""
    said: list[str] = []
    with (
        tempfile.TemporaryFile() as answer,
        subprocess.Popen(command, stdout=answer, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith(WAITS):
                    print(line, end="", file=sys.stderr, flush=True)
                elif line.strip():
                    said.append(line.strip())
        except BaseException:  # Ctrl-C, which in a notebook reaches only this process
            process.kill()
            raise
        status = process.wait()
        answer.seek(0)
        return status, said, answer.read()


def _read(tree: dict[str, Any], checkpoint: Checkpoint) -> Any:
    tensors = checkpoint.read(dict.fromkeys(state.list_names(tree["state"])))
    value = state.decode(tree["state"], tensors.__getitem__, torch.device("cpu"))
    if keys := tree.get("keys"):
        value = {keys.get(name, name): held for name, held in value.items()}
    return _number_parameters(value) if tree["kind"] == "optimizer" else value


def _number_parameters(value: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of an optimizer's parameters, which a checkpoint holds, by torch's numbers."""
    names = [name for group in value["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**g, "params": [numbers[n] for n in g["params"]]} for g in value["param_groups"]]
    states = {numbers.get(key, key): held for key, held in value["state"].items()}
    return {**value, "state": states, "param_groups": groups}
