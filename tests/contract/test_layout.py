"""Differences between ranks' states are reported by tensor, rank and shape."""

import pytest

from everstep_contract import codec, layout


def packed(*tensors: tuple[str, str, tuple[int, ...]]) -> str:
    return layout.pack(layout.describe(tensors))


W, W5, B = ("w", "float32", (4, 8)), ("w", "float32", (5, 8)), ("b", "int64", ())


def test_a_shape_that_differs_is_named_with_the_ranks_of_each() -> None:
    text = layout.explain_difference({0: packed(W, B), 1: packed(W5, B), 2: packed(B, W)})
    assert text == "tensor w is float32 (4, 8) on ranks 0, 2, float32 (5, 8) on rank 1"


def test_a_tensor_that_only_some_have_is_named() -> None:
    text = layout.explain_difference({0: packed(W, B), 1: packed(W)})
    assert text == "tensor b is int64 () on rank 0, missing on rank 1"


def test_of_many_the_first_are_named_and_the_rest_counted() -> None:
    few = packed(*((f"t{i}", "int8", (1,)) for i in range(9)))
    many = packed(*((f"t{i}", "int8", (2,)) for i in range(9)))
    text = layout.explain_difference({0: few, 1: many})
    assert text.count("tensor t") == 3
    assert text.endswith("and 6 more tensors")


def test_the_order_of_the_tensors_does_not_matter() -> None:
    assert layout.digest(layout.describe([W, B])) == layout.digest(layout.describe([B, W]))
    assert layout.explain_difference({0: packed(W, B), 1: packed(B, W)}) == ""


@pytest.mark.parametrize(
    "text", ["x", "eJwDAAAAAAE=", layout.pack(b"[1]"), layout.pack(b"no JSON")]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(codec.DecodeError, match="layout"):
        layout.unpack(text)
