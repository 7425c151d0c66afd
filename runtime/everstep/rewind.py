"""The state at the beginning of a step, so that a step that cannot end leaves no trace.

Before its first reduction is applied, a step may change the random states, the buffers that forward
changes (BatchNorm), the settings of optimizers, and schedules. These are copied when the step
begins. Parameters and other large state are not copied, so nothing may change them before the inner
loop. That is checked by versions; in the first step of a process also by comparing contents. Buffers
above a size limit are not copied, so forward must not change them; that is checked, too.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from everstep import randomness, state
from everstep.buffers import SMALL_BYTES, TOTAL_BYTES, Buffers
from everstep.errors import Misuse
from everstep.sharded import local_of, version_of
from everstep.small_state import SmallState
from everstep.tracked import Tracked


class StepStart:
    """A copy of what a step may change before its first reduction is applied."""

    def __init__(self, tracked: Tracked, buffers: Buffers, *, thorough: bool) -> None:
        """`thorough`: also compare contents, which costs a pass over the state, and list buffers."""
        self._tracked, self._buffers = tracked, buffers
        self._random = randomness.capture()
        self._small, self._settings = buffers.hold(), SmallState(tracked)
        self._large = buffers.mark_large()
        self._versions = list_versions(tracked)
        self._others = _list_other_versions(tracked)
        self._objects = tracked.tensors_of_large_objects()
        self._object_versions = {
            name: _list_versions_of(tensors) for name, tensors in self._objects.items()
        }
        self._thorough = thorough
        self._contents = _digest(tracked) if thorough else None
        self._compared = False
        """`require_untouched` has compared the contents."""

    def untouched(self) -> bool:
        """Whether no large state has changed since the step began."""
        return not self.list_changed()

    def list_changed(self) -> set[str]:
        """Names of parameters, and of tracked objects beside modules, that have changed in place
        since the step began.
        """
        parameters, others = list_versions(self._tracked), _list_other_versions(self._tracked)
        changed = {n for n, v in parameters.items() if self._versions.get(n) != v}
        changed |= {n for n, v in others.items() if self._others.get(n) != v}
        return changed | {
            n for n, t in self._objects.items() if _list_versions_of(t) != self._object_versions[n]
        }

    def require_untouched(self, step: int) -> None:
        """Raises `Misuse` if large state has changed before the inner loop of this step."""
        changed = self.list_changed()
        if self._contents is not None and not self._compared:
            now = _digest(self._tracked)
            changed |= {
                n for n in now.keys() | self._contents if now.get(n) != self._contents.get(n)
            }
            self._compared = True
        # If a tensor is named, the object that holds it need not be.
        changed -= {name.partition(".")[0] for name in changed if "." in name}
        if changed:
            raise Misuse(
                f"step {step}: the tracked state {join_names(changed)} was changed before the loop over "
                "step.batches, where a step that cannot be applied cannot be undone. Change it after "
                "that loop, or before job.steps"
            )

    def is_unused(self) -> bool:
        """Whether a step that was thorough has changed none of the large state, not even through `.data`."""
        if self._contents is None or self.list_changed():
            return False
        return _digest(self._tracked) == self._contents

    def put_back(self) -> None:
        self._buffers.put_back(self._small)
        self._settings.put_back()
        randomness.restore(self._random)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """A context in which all that the step may have changed so far is as it was when the step
        began; at its end the present state is restored. The script may have set a buffer since.
        """
        small, random = self._buffers.hold(), randomness.capture()
        self._buffers.put_back(self._small)
        randomness.restore(self._random)
        try:
            with self._settings.as_it_was():
                yield
        finally:
            self._buffers.put_back(small)
            randomness.restore(random)

    def check_buffers(self) -> None:
        """Raises `Misuse` if forward changed a buffer that is too large to be restored, or, in the first step,
        made one.
        """
        if self._thorough:
            self._buffers.require_known(self._tracked)
        if changed := self._buffers.find_changed_large(self._large):
            raise Misuse(
                f"forward changes the buffer {changed}; buffers that change may have at most {SMALL_BYTES >> 20} MiB "
                f"each and {TOTAL_BYTES >> 20} MiB together. Register it with persistent=False if a checkpoint need "
                "not hold it"
            )


def show_steps(tracked: Tracked) -> None:
    """Have the steps of all optimizers raise the versions of the parameters. Fused kernels do not raise
    them, nor do optimizers of other libraries that write through `.data` or with kernels of their own.
    """
    for _, optimizer in tracked.of_kind("optimizer"):
        if hasattr(
            optimizer, "_optimizer_step_post_hooks"
        ):  # else it wraps one, and takes no hooks
            optimizer.register_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    unseen = [g["params"] for g in optimizer.param_groups if g.get("fused") or not of_torch]
    torch.autograd.graph.increment_version(
        [p for p in chain.from_iterable(unseen) if p.grad is not None]
    )


def fingerprint(tracked: Tracked) -> tuple[Any, ...]:
    """A value that changes when a tracked parameter, or the memory that it lies in, a setting of an optimizer,
    or the count of a schedule changes.
    """
    counts = list_counts(tracked).values()
    places = tuple(local_of(p).data_ptr() for p in tracked.named_parameters().values())
    return (sum(list_versions(tracked).values()), places, _list_settings(tracked), *counts)


def _list_settings(tracked: Tracked) -> list[tuple[str, Any]]:
    """The numbers among the optimizers' settings, and the versions of those that are tensors."""
    groups = (g for _, optimizer in tracked.of_kind("optimizer") for g in optimizer.param_groups)
    settings = (
        (k, version_of(v) if isinstance(v, torch.Tensor) else v)
        for g in groups
        for k, v in g.items()
    )
    return [(key, value) for key, value in settings if type(value) in (int, float, bool)]


def list_counts(tracked: Tracked) -> dict[str, Any]:
    """Schedule → how often it has stepped."""
    schedules = tracked.of_kind("object")
    return {n: thing.last_epoch for n, thing in schedules if hasattr(thing, "last_epoch")}


def list_versions(tracked: Tracked) -> dict[str, int]:
    """Parameter → a number that grows when it is changed in place."""
    return {name: version_of(p) for name, p in tracked.named_parameters().items()}


def _list_other_versions(tracked: Tracked) -> dict[str, list[int]]:
    """Tracked tensor without gradient, or optimizer → the versions of its tensors. A tensor that is
    replaced shows, too, because an optimizer raises the versions of its own at each step.
    """
    tensors = {
        n: _list_versions_of([t]) for n, t in tracked.of_kind("tensor") if not t.requires_grad
    }
    return tensors | {n: _list_versions_of(_list_state(o)) for n, o in tracked.of_kind("optimizer")}


def _list_state(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    states = [own.values() for own in optimizer.state.values() if isinstance(own, dict)]
    return chain.from_iterable(states)


def _list_versions_of(values: Iterable[Any]) -> list[int]:
    """The versions of the tensors among `values`."""
    plain = torch.Tensor
    try:
        return [
            v._version if type(v) is plain else version_of(v)
            for v in values
            if type(v) is plain or isinstance(v, plain)
        ]
    except RuntimeError:  # a tensor made in `torch.inference_mode` has none
        return []


def join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


def _digest(tracked: Tracked) -> dict[str, int]:
    """Name → sum over the bits, of all tracked tensors except buffers and small state (learning rates
    that are tensors, too). It also detects changes through `.data`.
    """
    tensors: state.Tensors = {}
    tracked.capture(tensors)
    # By their memory: what is captured are other tensors, which share it.
    buffers = {local_of(b).data_ptr() for b in tracked.persistent_buffers().values()}
    small = {id(thing) for thing in tracked.small_objects()}
    left_out = (
        *(f"{n}/" for n, (_, thing) in tracked.objects.items() if id(thing) in small),
        *(f"{n}/param_groups/" for n, _ in tracked.of_kind("optimizer")),
    )
    chosen = {
        n: t
        for n, t in tensors.items()
        if local_of(t).data_ptr() not in buffers and not n.startswith(left_out)
    }
    sums = [_sum_bits(local_of(t)) for t in chosen.values()]
    names = [name.replace("/", ".", 1) for name in chosen]
    return dict(zip(names, (int(s) for s in sums), strict=True))


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(width).sum(dtype=torch.int64)
