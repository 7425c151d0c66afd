"""What tracked modules and optimizers were at `job.track`, and what the script must not change afterwards. A rank
that joins or restarts makes them anew and loads them at `job.track`, so it would not have such a change, or would
make it again.
"""

import weakref
from collections.abc import Collection

import torch

from everstep import digests, registrations
from everstep.errors import Misuse
from everstep.sharded import has_sharded, is_sharded, version_of
from everstep.tracked import Tracked

_OTHER_GROUPS = (
    "the parameters that this optimizer holds changed after job.track (add_param_group?). A rank that joins or "
    "restarts could not load its state, because the script makes the optimizer without them. Give it all parameters "
    "before job.track. Freeze those that are to be trained later: requires_grad_(step.number >= N) at each step"
)
_NEW = (
    "the module got this parameter after job.track. A rank that restarts would load the checkpoint before, into what "
    "the module had then, so the trained values would be lost. Make all parameters before job.track"
)
_CONVERTED = (
    "the script moved this parameter to another device, or gave it another dtype, after job.track. A rank that "
    "restarts would load the optimizer's state for the parameter as it was before. Call .to(job.device), .bfloat16() "
    "and the like before job.track"
)
_OTHER_VALUE = (
    "the script changed this parameter between job.track and job.steps. A rank that restarts would load the "
    "checkpoint before and change it again, so the trained values would be lost. Initialise the model, and load "
    "weights into it, before job.track"
)
_NEW_IN_STEPS = (
    "a tracked module got this parameter after job.steps had begun. Its gradients would not be summed over the ranks, "
    "and a rank that joins or restarts could not load it, because the script makes the module without it. Make all "
    "parameters before job.track. Freeze those that are to be trained later: requires_grad_(step.number >= N) at each "
    "step. To prune, call prune.identity before job.track, and change the mask after the loop over step.batches"
)


class AtTrack:
    """What is noted at `job.track`, and the checks against it."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._parameters: dict[str, dict[int, weakref.ref[torch.nn.Parameter]]] = {}
        """Module → the parameters that it had when it was tracked, by their ids."""
        self._groups: dict[str, list[int]] = {}
        """Optimizer → number of parameters in each of its groups when it was tracked."""
        self._versions: dict[int, int] = {}
        """Id of a parameter → its version after it was tracked, and loaded if there was a checkpoint. Without
        those whose first forward sets them (LazyLinear).
        """
        self._kinds: dict[int, tuple[torch.dtype, torch.device]] = {}
        """Id of such a parameter → its dtype and device then, if the process begins a run."""
        self._bits: dict[int, int] = {}
        """Id of such a parameter → the sum of its bits then, if the process begins a run."""
        self._registrations: int | None = None
        """`registrations.count` when the parameters were last compared; None: training has not begun."""

    def note_parameters(self, name: str) -> None:
        """Record which parameters a module has, before it is loaded."""
        kind, thing = self._tracked.objects[name]
        if kind == "module":
            self._parameters[name] = {id(p): weakref.ref(p) for p in thing.parameters()}

    def note_groups(self, new: Collection[str]) -> None:
        """Record how many parameters the optimizers among `new` hold, before they are loaded."""
        for name in new:
            kind, thing = self._tracked.objects[name]
            if kind == "optimizer":
                self._groups[name] = _count_parameters(thing)

    def note_values(self, new: Collection[str], *, begins: bool) -> None:
        """Record the state of the parameters of the modules among `new`, which are loaded if there is a checkpoint.

        Args:
            begins: whether this process begins a run. Then what the parameters hold is recorded, too, because
                neither a change through `.data` nor a conversion raises a version. What the script does to them
                after this call, it does at each start.
        """
        for name in new:
            kind, thing = self._tracked.objects[name]
            parameters = list(thing.parameters()) if kind == "module" else []
            parameters = [p for p in parameters if not torch.nn.parameter.is_lazy(p)]
            self._versions |= {id(p): version_of(p) for p in parameters}
            if begins:
                self._kinds |= {id(p): (p.dtype, p.device) for p in parameters}
                self._bits |= _sum_bits(parameters)

    def require_same_groups(self) -> None:
        """Raises `Misuse` if an optimizer has got or lost parameters since it was tracked."""
        now = {n: _count_parameters(o) for n, o in self._tracked.of_kind("optimizer")}
        if changed := [name for name in now if now[name] != self._groups.get(name)]:
            raise Misuse(f"{changed[0]}: {_OTHER_GROUPS}")

    def require_same_since_track(self) -> None:
        """Raises `Misuse` if a module has got parameters since it was tracked, or one of them has another
        value, dtype or device, unless it was sharded since.
        """
        held = {id(parameter) for _, parameter in self._tracked.held_parameters()}
        for name, module in self._tracked.of_kind("module"):
            if has_sharded(module):
                continue
            for key, parameter in module.named_parameters():
                if problem := self._find_change(name, parameter, held):
                    raise Misuse(f"{name}.{key}: {problem}")

    def _find_change(
        self, module: str, parameter: torch.nn.Parameter, held: Collection[int]
    ) -> str:
        """Describe how the parameter changed; empty: it did not. `held`: ids of those that optimizers hold."""
        found = self._parameters[module].get(id(parameter))
        if found is None or found() is not parameter:
            return _NEW
        if id(parameter) in held and self._is_converted(parameter):
            return _CONVERTED
        return _OTHER_VALUE if self._has_other_value(parameter) else ""

    def _is_converted(self, parameter: torch.nn.Parameter) -> bool:
        kind = parameter.dtype, parameter.device
        return kind != self._kinds.get(id(parameter), kind)

    def _has_other_value(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter has another value than when it was tracked."""
        version = version_of(parameter)
        if version != self._versions.get(id(parameter), version):
            return True
        kind = self._kinds.get(id(parameter))
        if kind is not None and kind[0] != parameter.dtype:
            return False  # converted, and no optimizer holds it: a restart converts it again
        bits = self._bits.get(id(parameter))
        return bits is not None and _sum_bits([parameter]) != {id(parameter): bits}

    def require_same_parameters(self) -> None:
        """Raises `Misuse` if a module has got parameters since the first call, or has one under another name."""
        seen, self._registrations = self._registrations, registrations.count()
        if seen in (None, self._registrations):
            return
        known = self._tracked.named_parameters()
        if any(map(is_sharded, known.values())):
            return  # FSDP2 shows other parameters while it holds them complete
        found = self._tracked.find_parameters().items()
        ids = set(map(id, known.values()))
        new = [
            name
            for name, p in found
            if (id(p) not in ids or name not in known) and isinstance(p, torch.nn.Parameter)
        ]
        if new:
            raise Misuse(f"{new[0]}: {_NEW_IN_STEPS}")


def _count_parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    """Number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _sum_bits(parameters: Collection[torch.nn.Parameter]) -> dict[int, int]:
    """Id → sum of the bits, for those that are plain tensors in memory."""
    plain = [
        p
        for p in parameters
        if type(p.data) is torch.Tensor and p.layout == torch.strided and not p.is_meta
    ]
    return dict(zip(map(id, plain), digests.sum_all(plain), strict=True))
