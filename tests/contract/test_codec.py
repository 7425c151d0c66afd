import enum
from dataclasses import dataclass, field

import pytest

from everstep_contract import codec


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    inner: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    colour: Colour = Colour.RED
    maybe: float | None = None
    by_slot: dict[int, float] = field(default_factory=dict)
    flag: bool = False


def test_a_value_survives_the_way_there_and_back() -> None:
    value = Outer(
        name="x",
        inner=(Inner(n=1), Inner(n=2)),
        pair=(3, "y"),
        maybe=1.5,
        by_slot={1: 0.5, -2: 1.0},
        flag=True,
    )
    assert codec.loads(Outer, codec.dumps(value)) == value


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    assert codec.loads(Outer, '{"name": "x", "of_a_newer_peer": [1]}') == Outer(name="x")


def test_whole_numbers_are_floats_where_floats_are_wanted() -> None:
    assert codec.loads(Outer, '{"name": "x", "maybe": 2}').maybe == 2.0


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("[]", "Outer: expected an object, found list"),
        ("{", "Outer: not JSON"),
        ("{}", "name"),
        ('{"name": 1}', "Outer.name: expected str, found 1"),
        ('{"name": "x", "flag": 1}', "Outer.flag: expected bool"),
        ('{"name": "x", "inner": {}}', "Outer.inner: expected a list, found dict"),
        ('{"name": "x", "inner": [{"n": 1}, {"n": true}]}', "Outer.inner[1].n: expected int"),
        ('{"name": "x", "pair": [1]}', "Outer.pair: expected 2 items, found 1"),
        ('{"name": "x", "colour": "blue"}', "Outer.colour: 'blue' is none of red"),
        ('{"name": "x", "by_slot": {"a": 1}}', "Outer.by_slot: expected int, found 'a'"),
        ('{"name": "x", "by_slot": {"1": "a"}}', "Outer.by_slot.1: expected float"),
        (f'{{"name": "x", "maybe": {"9" * 400}}}', "Outer.maybe: 999"),
        ("[" * 100_000, "Outer: not JSON"),
    ],
)
def test_a_document_of_another_shape_is_refused_by_field(document: str, said: str) -> None:
    with pytest.raises(codec.DecodeError) as caught:
        codec.loads(Outer, document)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
