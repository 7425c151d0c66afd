import enum
import re
import typing
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    count: int
    part: Outer | None = None
    others: tuple[Outer, ...] = ()


def test_a_reader_finds_what_a_decoder_finds_and_keeps_what_is_as_before() -> None:
    reader = codec.Reader(Whole)
    part = Outer(name="x", inner=(Inner(n=1),), by_slot={1: 0.5})
    for value in (
        Whole(count=2, part=part, others=(part,)),
        Whole(count=2, part=Outer(name="y", inner=(Inner(n=1),))),
        Whole(count=2),
        Whole(count=3, part=Outer(name="z", maybe=1.0), others=(part, part)),
        Whole(count=3, part=part, others=(part,)),
    ):
        assert reader.read(codec.dumps(value)) == value
    kept = codec.Reader(Whole)
    first = kept.read(codec.dumps(Whole(count=1, part=part, others=(part,))))
    changed = Outer(name="changed", inner=part.inner, by_slot=part.by_slot)
    second = kept.read(codec.dumps(Whole(count=2, part=changed, others=(part,))))
    assert first.part is not None
    assert second.part is not None
    assert second.others is first.others
    assert second.part.inner is first.part.inner


def test_a_reader_takes_the_default_of_what_the_next_document_lacks() -> None:
    reader = codec.Reader(Outer)
    reader.read('{"name": "x", "flag": true, "maybe": 1.5}')
    assert reader.read('{"name": "x"}') == Outer(name="x")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ('{"name": 1}', "Outer.name: expected str, found 1"),
        ('{"name": "x", "inner": [{"n": "a"}]}', "Outer.inner[0].n: expected int"),
        ("{}", "name"),
        ("[]", "Outer: expected an object, found list"),
    ],
)
def test_a_reader_refuses_by_field_and_reads_on(document: str, said: str) -> None:
    reader = codec.Reader(Outer)
    known = reader.read('{"name": "x", "inner": [{"n": 1}]}')
    with pytest.raises(codec.DecodeError, match=re.escape(said)):
        reader.read(document)
    assert reader.read('{"name": "x", "inner": [{"n": 1}]}') == known


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """It contains itself."""

    leaf: Leaf | None = None
    branches: tuple["Tree", ...] = ()
    by_name: dict[str, Leaf] = field(default_factory=dict)


def test_a_prepared_class_is_read_and_written_without_looking_at_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec.prepare(Tree)
    monkeypatch.delattr(typing, "get_type_hints")
    tree = Tree(leaf=Leaf(n=1), branches=(Tree(by_name={"x": Leaf(n=2)}),))
    assert codec.loads(Tree, codec.dumps(tree)) == tree
