"""State is encoded as JSON and tensors. A wrapper does not change parameter names."""

import collections
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import swa_utils

from everstep import containers, loading, parameter_names, state
from everstep.errors import StateError
from everstep.tracked import Tracked
from everstep_contract import codec

CPU = torch.device("cpu")


def there_and_back(value: Any) -> Any:
    tensors: state.Tensors = {}
    tree = json.loads(json.dumps(state.encode(value, "thing", tensors), allow_nan=False))
    return state.decode(tree, tensors.__getitem__, CPU)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 2**70, 1.5, -0.0, 0.1, "ä", "$tensor", [], (), {}, [1, (2, [3])],
        {"a": {"b": (1, None)}}, {1: "x", "1": "y"}, {(1, 2): 3, None: 4, 2.5: 5, True: 6},
        {"$tensor": "a user's own key"}, b"\x00\xff", complex(1, -2), torch.float16,
        math.inf, -math.inf, collections.Counter({30: 1, 80: 2}),
        collections.Counter({"a": np.int64(3), "b": -math.inf}),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


class Script:
    """An object of a script, with state of its own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_keys_of_a_scripts_own_state_keep_their_order() -> None:
    before = {"queue": {"late": 1, "early": [{"b": 1, "a": 2}]}, "at": 3}
    assert repr(through_a_checkpoint(before)) == repr(before)


def through_a_checkpoint(before: dict[str, Any]) -> dict[str, Any]:
    """The state of a script's object, as it comes back from a manifest."""
    tracked, tensors = Tracked(), state.Tensors()
    tracked.add("own", Script(before))
    raw = codec.dumps(tracked.capture(tensors))
    found = Script({})
    new = Tracked()
    new.add("own", found)
    new.load(["own"], json.loads(raw), lambda _: dict(tensors), CPU)
    return found.state


class Counting(torch.nn.Module):
    """A module with state of its own beside its tensors."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.count = count

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize(
    ("before", "at_start"),
    [(5, 0), (2.5, 0.0), (True, False), ("a $tensor", ""), (torch.ones(2), 0), (0, torch.ones(2))],
)
def test_the_extra_state_of_a_module_comes_back(before: Any, at_start: Any) -> None:
    tracked, tensors = Tracked(), state.Tensors()
    tracked.add("model", Counting(before))
    trees = json.loads(codec.dumps(tracked.capture(tensors)))
    found, new = Counting(at_start), Tracked()
    new.add("model", found)
    new.load(["model"], trees, lambda wanted: {name: tensors[name] for name in wanted}, CPU)
    assert repr(found.count) == repr(before)


class Best(NamedTuple):
    step: int
    loss: torch.Tensor


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(late=[1], early={}), collections.defaultdict(list, b=[1], a=[2]),
        collections.defaultdict(None, {3: 4}), collections.defaultdict(int, {(1, 2): 3}),
        bytearray(b"raw"), [collections.OrderedDict({2: "y", 1: "x"})],
    ],
)  # fmt: skip
def test_the_containers_of_a_scripts_own_state_keep_their_types(value: Any) -> None:
    found = through_a_checkpoint({"own": value})["own"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_a_named_tuple_comes_back_with_its_fields() -> None:
    best = Best(3, torch.tensor([1.5]))
    found = through_a_checkpoint({"best": best})["best"]
    assert type(found) is Best
    assert (found.step, found.loss.item()) == (3, 1.5)


def test_a_named_tuple_whose_class_is_gone_or_has_changed_keeps_its_fields() -> None:
    local = collections.namedtuple("local", ["step", "name"])
    found = through_a_checkpoint({"own": local(3, "a")})["own"]
    assert (found, found.name) == ((3, "a"), "a")
    changed = containers.make_named(Best.__module__, "Best", ["epoch", "loss"], [1, 2.0])
    assert (changed.epoch, changed.loss) == (1, 2.0)
    elsewhere = containers.make_named("os", "system", ["command"], ["true"])
    assert elsewhere.command == "true"


def test_a_defaultdict_whose_missing_values_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(
        StateError, match=r"own/counts: cannot store a defaultdict.*load_state_dict"
    ):
        through_a_checkpoint({"counts": collections.defaultdict(lambda: 7)})


def test_nan_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_a_tensor_comes_back(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    found = there_and_back({"deep": [value]})["deep"][0]
    assert found.dtype == dtype
    assert torch.equal(found, value)


def test_arrays_and_numpy_scalars_come_back() -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = there_and_back((array, np.float32(0.1), np.int64(5)))
    assert np.array_equal(found[0], array)
    assert found[0].dtype == array.dtype
    assert found[1:] == (np.float32(0.1), 5)


def test_the_state_of_numpys_generator_comes_back() -> None:
    before = np.random.get_state()
    found = there_and_back(before)
    drawn = np.random.rand(3)
    np.random.set_state(found)
    assert np.array_equal(drawn, np.random.rand(3))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"fn": len}, "thing/fn: cannot store a builtins.builtin_function_or_method"),
        ([{1, 2}], "thing/0: cannot store a builtins.set"),
        ({"x": torch.eye(3).to_sparse()}, "thing/x: cannot store a sparse"),
        (
            {"x": torch.empty(3, device="meta")},
            r"thing/x: this tensor is on the device meta.*to_empty",
        ),
        (
            {"x": torch.ones(2, dtype=torch.complex64).conj()},
            r"thing/x: cannot store a tensor that torch conjugates.*resolve_conj",
        ),
        (
            {"x": torch.ones(2, dtype=torch.complex64).conj().imag},
            r"thing/x: cannot store a tensor that torch conjugates.*resolve_neg",
        ),
        ({object(): 1}, "thing: cannot store the key"),
        (np.array([object()]), "thing: cannot store a numpy.ndarray"),
        (
            {"x": np.ma.array([1, 2], mask=[False, True])},
            "thing/x: cannot store a numpy.ma.*MaskedArray",
        ),
        ({"x": np.zeros(2, ">f4")}, r"thing/x: cannot store an array of dtype.*>f4.*astype"),
        ({"x": np.zeros(2, np.longdouble)}, r"thing/x: cannot store an array of dtype.*astype"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        there_and_back(value)


def test_two_tensors_with_one_path_keep_apart() -> None:
    found = there_and_back({1: torch.zeros(1), "1": torch.ones(1)})
    assert [found[1].item(), found["1"].item()] == [0, 1]


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(StateError, match=r"\$later"):
        state.decode({"$later": 1}, lambda _: torch.empty(0), CPU)


def test_wrappers_leave_no_trace_in_names() -> None:
    keys = ["_orig_mod.fc.weight", "module.fc.bias", "n_averaged", "module._orig_mod.x"]
    assert list(parameter_names.canonical(keys).values()) == [
        "fc.weight",
        "fc.bias",
        "n_averaged",
        "x",
    ]


def test_a_script_gets_an_averaged_model_as_its_load_state_dict_takes_it() -> None:
    """Its names begin with `module.`, which a wrapper's would, too."""
    tracked = Tracked()
    made = torch.nn.ModuleDict({"_orig_mod": torch.nn.Linear(2, 1)})  # as torch.compile makes
    tracked.add("ema", swa_utils.AveragedModel(torch.nn.Linear(2, 1)))
    tracked.add("model", made)
    tensors: state.Tensors = {}
    trees = json.loads(json.dumps(tracked.capture(tensors)))

    class Stored:
        def read(self, wanted: dict[str, Any]) -> state.Tensors:
            return {name: tensors[name] for name in wanted}

    found = {name: loading._read(tree, Stored()) for name, tree in trees.items()}  # type: ignore[arg-type]
    again = swa_utils.AveragedModel(torch.nn.Linear(2, 1))
    again.load_state_dict(found["ema"])
    assert torch.equal(again.module.weight, tensors["ema/weight"])
    torch.nn.Linear(2, 1).load_state_dict(found["model"])


def test_names_that_would_collide_are_left_alone() -> None:
    keys = ["module.weight", "weight", "module"]
    assert parameter_names.canonical(keys) == {k: k for k in keys}
