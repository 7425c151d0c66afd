"""The objects of `job.track`: their state is the training state, captured and loaded by name."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from everstep import optimizer_state, parameter_names, registrations, state
from everstep.errors import Misuse, StateError
from everstep.sharded import Like, has_sharded, is_sharded, local_of
from everstep_contract.layout import OWN

ORDER = ("module", "tensor", "optimizer", "object")
"""Modules are loaded first, because the others may read them."""
SMALL_BYTES = 64 << 10
"""Limit for the state of an object that is copied at every step."""

_TRAINS = torch.nn.Module()
"""A module in train mode."""

Read = Callable[[Mapping[str, torch.Tensor | Like | None]], Mapping[str, torch.Tensor]]
"""`Checkpoint.read`, or the same for tensors that another member sent."""


def kind_of(name: str, thing: Any) -> str:
    """Return the kind of an object. Raises `Misuse` if it cannot be tracked."""
    if isinstance(thing, (DistributedDataParallel, DataParallel)):
        raise Misuse(
            f"track({name}=…): {type(thing).__name__} reduces gradients itself; leave it out, track the model that it "
            "wraps, and compute with that"
        )
    if isinstance(thing, type):
        raise Misuse(
            f"track({name}=…): {thing.__name__} is a class; track an instance of it, as in "
            f"{name}={thing.__name__}(…)"
        )
    if isinstance(thing, torch.nn.Module):
        return "module"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, torch.Tensor):
        return "tensor"
    if callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    ):
        return "object"
    raise Misuse(
        f"track({name}=…): a {type(thing).__name__} has no state_dict() and load_state_dict(); "
        "track modules, optimizers, schedules, scalers, tensors, or give it both methods"
    )


class Tracked:
    """The tracked objects by name, in the order in which they were tracked."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[str, Any]] = {}
        self._parameters: dict[str, torch.nn.Parameter] | None = None
        self._small: dict[str, Any] | None = None
        self._large: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        """Object that is not small → the tensors in its state."""
        self._by_key: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._stay: dict[str, bool] = {}
        self._sharded: dict[str, bool] = {}
        self._walked: tuple[int, list[tuple[str, torch.nn.Module, torch.nn.Module]]] = (-1, [])
        """`registrations.count` when the modules were last listed, and the list."""

    def add(self, name: str, thing: Any) -> None:
        if name in self.objects:
            raise Misuse(f"track({name}=…): this name is tracked already")
        if "/" in name or name.startswith("$"):
            raise Misuse(
                f"track({name}=…): a name has no / and does not begin with $; choose another"
            )
        if f"{name}/" == OWN:
            raise Misuse(
                f"track({name}=…): checkpoints hold the states of the random generators under this "
                "name; choose another"
            )
        kind = kind_of(name, thing)
        if shared := _find_shared(name, kind, thing):
            raise Misuse(
                f"track({name}=…): several elements of {shared} are the same number in memory (it was made by expand), "
                "so torch could not load it from a checkpoint; use expand(…).clone(), or register it with "
                "persistent=False"
            )
        self.objects[name] = (kind, thing)
        self._forget()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """If an exception ends it, what was added within it is not tracked: a script may catch the exception, and track
        the rest again.
        """
        before = self.objects.copy()
        try:
            yield
        except BaseException:
            self.objects = before
            self._forget()
            raise

    def _forget(self) -> None:
        """Forget what was found out about the objects tracked so far."""
        self._parameters = self._small = None
        self._walked = (-1, [])
        self._by_key.clear()
        self._stay.clear()
        self._sharded.clear()

    def of_kind(self, kind: str) -> Iterator[tuple[str, Any]]:
        for name, (own, thing) in self.objects.items():
            if own == kind:
                yield name, thing

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter of the tracked modules once, under its first name."""
        if self._parameters is None:
            self._parameters = self.find_parameters()
        return self._parameters

    def find_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The same, as the modules hold them now: `named_parameters` lists them once, until more is tracked."""
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, module in self.of_kind("module"):
            own = dict(module.named_parameters())
            short = parameter_names.canonical(own)
            for key, parameter in own.items():
                found.setdefault(id(parameter), (f"{name}.{short[key]}", parameter))
        for name, tensor in self.of_kind("tensor"):
            if tensor.requires_grad:
                found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def parameters_of(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Key in a module's state_dict → parameter, all keys of a shared parameter included."""
        if name not in self._by_key:
            _, module = self.objects[name]
            self._by_key[name] = dict(module.named_parameters(remove_duplicate=False))
        return self._by_key[name]

    def require_known(self, new: Collection[str]) -> None:
        """Raises `Misuse` if an optimizer among `new` holds a parameter that no module tracked so far has. A
        rank that restarts loads it here, so it must find its parameters.
        """
        for name in new:
            kind, thing = self.objects[name]
            if kind == "optimizer":
                optimizer_state.list_names(name, thing, self.find_parameters())

    def find_not_finite(self) -> str:
        """Name of a parameter that holds NaN or infinity on this rank; empty: none does."""
        parameters = ((n, local_of(p)) for n, p in self.named_parameters().items())
        return next((n for n, p in parameters if not bool(torch.isfinite(p).all())), "")

    def held_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of those that a tracked optimizer holds (all, if none is tracked), in the order of the
        modules.
        """
        held = {
            id(parameter)
            for _, (_, thing) in self.objects.items()
            for group in _groups(thing)
            for parameter in group["params"]
        }
        for name, parameter in self.named_parameters().items():
            if not held or id(parameter) in held:
                yield name, parameter

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that require a gradient and that a tracked optimizer holds (all, if none is
        tracked), in the order of the modules.
        """
        return {name: p for name, p in self.held_parameters() if p.requires_grad}

    def list_frozen(self) -> list[str]:
        """Names of the parameters that a tracked optimizer holds and that require no gradient now."""
        return [name for name, p in self.held_parameters() if not p.requires_grad]

    def freeze(self, names: Collection[str]) -> None:
        """Let these parameters require no gradient, and all others that a tracked optimizer holds require one."""
        for name, parameter in self.held_parameters():
            if parameter.requires_grad == (name in names):
                parameter.requires_grad_(name not in names)

    def list_modes(self) -> list[str]:
        """Names of the modules whose mode (`train`, `eval`) is another one than that of the module around them; of
        a tracked module: that are in eval mode.
        """
        return [name for name, module, above in self._walk() if module.training != above.training]

    def set_modes(self, names: Collection[str]) -> None:
        """Set the mode of all modules, so that `list_modes` returns these names."""
        for name, module, above in self._walk():
            trains = above.training != (name in names)
            if module.training != trains:
                module.training = trains

    def _walk(self) -> list[tuple[str, torch.nn.Module, torch.nn.Module]]:
        """The modules, each under its first name, with the module around it, which comes before it. They are
        listed again only after one was registered: a boundary asks for them.
        """
        if (count := registrations.count()) != self._walked[0]:
            self._walked = count, list(self._list_modules())
        return self._walked[1]

    def _list_modules(self) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
        for name, root in self.of_kind("module"):
            known = {"": root}
            yield name, root, _TRAINS
            for path, module in root.named_modules():
                if path:
                    known[path] = module
                    yield f"{name}.{path}", module, known.get(path.rpartition(".")[0], root)

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a checkpoint holds, each once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in self.of_kind("module"):
            kept = module.state_dict(keep_vars=True)
            for key, buffer in module.named_buffers():
                if kept.get(key) is buffer:
                    found.setdefault(id(buffer), (f"{name}.{key}", buffer))
        return dict(found.values())

    def small_objects(self) -> list[Any]:
        """Objects whose state may be copied at every step: schedules, counters. Not scalers:
        reading one waits for the device, and it changes only after the inner loop.
        """
        return [thing for thing, _ in self.small_states()]

    def small_states(self) -> list[tuple[Any, Any]]:
        """The small objects and their state. One that has grown is small no longer: an optimizer of
        another library, which makes its state in the first step, or a long list of losses.
        """
        if self._small is None:
            self._large = {}
            scaler = torch.amp.GradScaler
            self._small = {n: o for n, o in self.of_kind("object") if not isinstance(o, scaler)}
        states = {name: thing.state_dict() for name, thing in self._small.items()}
        for name, own in states.items():
            if state.count_bytes(own) > SMALL_BYTES:
                self._large[name] = [weakref.ref(tensor) for tensor in state.list_tensors(own)]
                del self._small[name]
        return [(thing, states[name]) for name, thing in self._small.items()]

    def tensors_of_large_objects(self) -> dict[str, list[torch.Tensor]]:
        """Object → the tensors that it holds itself, as long as it does not replace them. Copies that
        a `state_dict` makes are not among them.
        """
        if self._small is None:
            self.small_states()
        return {
            name: [found for ref in refs if (found := ref()) is not None]
            for name, refs in self._large.items()
        }

    def may_hold_optimizers(self) -> bool:
        """Whether the state of some object may hold that of an optimizer within it: its state_dict is
        not torch's own (an optimizer that wraps another, an object of the script).
        """
        known = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
        if any(not isinstance(thing, known) for _, thing in self.of_kind("object")):
            return True
        plain = (*self.of_kind("module"), *self.of_kind("optimizer"))
        return any(not self.stays(name) for name, _ in plain)

    def prepare_scalers(self, device: torch.device) -> None:
        """Make every GradScaler create its scale. It does so with the first loss, and a rank
        that has no micro-batch, or skips all of its own, has no loss.
        """
        for _, thing in self.of_kind("object"):
            if isinstance(thing, torch.amp.GradScaler):
                thing.scale(torch.zeros((), device=device))

    def capture(self, tensors: state.Tensors) -> dict[str, Any]:
        """The tree of all objects; their tensors (by reference) are added to `tensors`."""
        return {name: self.capture_one(name, tensors) for name in self.objects}

    def capture_one(
        self, name: str, tensors: state.Tensors, own: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The tree of one object. `own`: its state_dict; None: the object is asked for it."""
        kind, thing = self.objects[name]
        if own is None and kind != "tensor":
            own = thing.state_dict()
        value = self._state_of(name, kind, thing, own)
        # Keys of modules and optimizers are looked up in the tree, and their order has no meaning.
        tree = state.encode(value, name, tensors, exact=kind == "object")
        keys = parameter_names.plain(own or ()) if kind == "module" else {}
        return {"kind": kind, "state": tree} | ({"keys": keys} if keys else {})

    def stays(self, name: str) -> bool:
        """Whether the object's large state, and the names of all its state, stay as they are until
        a step is applied. That holds for modules and optimizers whose state_dict is torch's own.
        """
        if name not in self._stay:
            self._stay[name] = _is_plain(*self.objects[name])
        return self._stay[name]

    def has_sharded(self, name: str) -> bool:
        """Whether the object is a module with DTensors."""
        if name not in self._sharded:
            kind, thing = self.objects[name]
            self._sharded[name] = kind == "module" and has_sharded(thing)
        return self._sharded[name]

    def load(
        self, new: list[str], trees: dict[str, Any], read: Read, device: torch.device
    ) -> list[str]:
        """Load the objects named in `new` from the checkpoint's trees.

        Args:
            read: returns tensors by name, in memory that the objects may keep.

        Returns:
            The tensors whose values were converted, with both dtypes.

        Raises:
            StateError: the checkpoint lacks one of them, or its state does not fit.
        """
        converted: set[int] = set()
        told: list[str] = []
        for name in sorted(new, key=lambda n: ORDER.index(self.objects[n][0])):
            kind, thing = self.objects[name]
            if name not in trees:
                raise StateError(
                    f"track({name}=…): the checkpoint has no {name!r}, it has "
                    f"{', '.join(sorted(trees))}; track it under its old name, or start another run "
                    "(--run, checkpoint.run)"
                )
            if trees[name]["kind"] != kind:
                raise StateError(
                    f"track({name}=…): this is of kind {kind}, but under this name the checkpoint has the kind "
                    f"{trees[name]['kind']}; choose another name, or start another run (--run, checkpoint.run)"
                )
            tree = trees[name]["state"]
            wanted = self._list_wanted(name, tree)
            tensors = read({**dict.fromkeys(state.list_names(tree)), **wanted})
            own = {n: t for n, t in wanted.items() if isinstance(t, torch.Tensor)}
            others = {n: t for n, t in own.items() if t.dtype != tensors[n].dtype}
            converted |= {id(t) for t in others.values()}
            told += [_describe_dtypes(n, tensors[n], t) for n, t in others.items()]
            value = state.decode(tree, tensors.__getitem__, device)
            self._load_one(name, kind, thing, value, converted)
        return told

    def load_rates(
        self, new: list[str], trees: dict[str, Any], read: Read, device: torch.device
    ) -> None:
        """Load the settings again of optimizers that were loaded before their schedules in `new` were
        made: a schedule that is made sets the learning rate to that of its beginning.
        """
        made_for = [getattr(o, "optimizer", None) for n, o in self.of_kind("object") if n in new]
        for name, optimizer in self.of_kind("optimizer"):
            if any(one is optimizer for one in made_for):
                groups = trees[name]["state"]["param_groups"]
                tensors = read(dict.fromkeys(state.list_names(groups)))
                stored = state.decode(groups, tensors.__getitem__, device)
                optimizer_state.load_settings(optimizer, stored)

    def _list_wanted(self, name: str, tree: Any) -> dict[str, torch.Tensor | Like]:
        """Stored name → the tensor to read it into, or a `Like` for how to divide it."""
        kind, thing = self.objects[name]
        if kind in ("module", "tensor"):
            return dict(_list_own(kind, thing, tree))
        parameters = self.named_parameters()
        if not any(map(is_sharded, parameters.values())):
            return {}
        held: state.Tensors = {}
        self.capture_one(name, held)
        wanted = {n: Like(t) for n, t in held.items() if is_sharded(t)}
        if kind == "optimizer":
            wanted = {n: Like(p) for n, p in optimizer_state.list_states(tree, parameters)} | wanted
        return dict(wanted)

    def _state_of(self, name: str, kind: str, thing: Any, own: Any) -> Any:
        """`own`: its state_dict, if it is no tensor."""
        if kind == "tensor":
            return thing
        if kind == "module":
            short = parameter_names.canonical(own)
            return {short[key]: value for key, value in own.items()}
        if kind == "optimizer":
            return optimizer_state.by_name(name, thing, own, self.named_parameters())
        return own

    def _load_one(
        self, name: str, kind: str, thing: Any, value: Any, converted: Collection[int]
    ) -> None:
        """`converted`: the ids of parameters that have another dtype than the stored ones."""
        try:
            if kind == "tensor":
                _fill(thing, value)
            elif kind == "module":
                back = {
                    short: key
                    for key, short in parameter_names.canonical(thing.state_dict()).items()
                }
                thing.load_state_dict({back.get(k, k): v for k, v in value.items()})
            elif kind == "optimizer":
                given = optimizer_state.by_number(name, thing, value, self.named_parameters())
                optimizer_state.load(thing, given)
                optimizer_state.keep_layouts(thing, given, converted)
            else:
                thing.load_state_dict(value)
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(
                f"{name}: the checkpoint does not fit: {' '.join(str(error).split())} "
                "Build it as it was when it was saved, or start another run (--run, checkpoint.run)"
            ) from None


def _fill(tensor: torch.Tensor, stored: torch.Tensor) -> None:
    """Raises ValueError if the shapes differ: `copy_` would repeat the stored numbers."""
    if stored.shape != tensor.shape:
        there, here = tuple(stored.shape), tuple(tensor.shape)
        raise ValueError(
            f"it holds a tensor of shape {there}, and the script tracks one of shape {here}."
        )
    with torch.no_grad():
        tensor.copy_(stored)


def _describe_dtypes(name: str, stored: torch.Tensor, own: torch.Tensor) -> str:
    was, now = (state.dtype_name(t.dtype) for t in (stored, own))
    return f"{name} ({was}, now {now})"


def _list_own(kind: str, thing: Any, tree: Any) -> dict[str, torch.Tensor]:
    """Stored name → the object's own tensor to read it into, if loading is nothing but a copy. A
    module then loads its own tensors, which copies nothing.
    """
    if kind == "tensor":
        return {tree["$tensor"]: thing}
    if kind != "module" or type(thing).load_state_dict is not torch.nn.Module.load_state_dict:
        return {}
    own = thing.state_dict(keep_vars=True)
    found = {}
    for key, short in parameter_names.canonical(own).items():
        tag, held = tree.get(short), own[key]
        is_stored = isinstance(tag, dict) and "$tensor" in tag
        # What a module's get_extra_state returns need not be a tensor, here or in the checkpoint.
        if is_stored and isinstance(held, torch.Tensor) and not torch.nn.parameter.is_lazy(held):
            found[tag["$tensor"]] = held
    return found


def _find_shared(name: str, kind: str, thing: Any) -> str:
    """Name of a tensor that is loaded in place, and whose elements share memory; empty: there is none."""
    if kind == "tensor":
        return name if _is_expanded(thing) else ""
    for place, module in thing.named_modules(prefix=name) if kind == "module" else ():
        if type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict:
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if key not in module._non_persistent_buffers_set and _is_expanded(tensor):
                return f"{place}.{key}"
    return ""


def _is_expanded(tensor: torch.Tensor | None) -> bool:
    if tensor is None or torch.nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sides)


def _is_plain(kind: str, thing: Any) -> bool:
    if kind == "optimizer":
        if type(thing).state_dict is not torch.optim.Optimizer.state_dict:
            return False
        hooks = (thing._optimizer_state_dict_pre_hooks, thing._optimizer_state_dict_post_hooks)
        return not any(hooks)
    return kind == "module" and all(_is_plain_module(module) for module in thing.modules())


def _is_plain_module(module: torch.nn.Module) -> bool:
    plain, own = torch.nn.Module, type(module)
    return (
        own.state_dict is plain.state_dict
        and own._save_to_state_dict is plain._save_to_state_dict
        and own.get_extra_state is plain.get_extra_state
        and not module._state_dict_hooks
        # FSDP2's hook puts the shards back in place; at a boundary they are there already.
        and all(_is_of_fsdp(hook) for hook in module._state_dict_pre_hooks.values())
    )


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _groups(thing: Any) -> list[dict[str, Any]]:
    groups = getattr(thing, "param_groups", None)
    return groups if isinstance(groups, list) else []
