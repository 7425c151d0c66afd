"""The table of XID codes."""

import pytest

from everstep_operator.health import xids

TABLE = xids.load_xids()


@pytest.mark.parametrize("code", [8, 13, 31, 43, 45, 68, 69, 137])
def test_an_application_error_never_convicts(code: int) -> None:
    assert TABLE[code].verdict is xids.XidVerdict.NEVER


@pytest.mark.parametrize("code", [46, 48, 62, 64, 95, 119, 120, 140, 143, 158])
def test_a_fatal_code_means_leaving(code: int) -> None:
    assert TABLE[code].verdict is xids.XidVerdict.LEAVING


def test_only_fallen_off_the_bus_means_gone() -> None:
    assert [x.code for x in TABLE.values() if x.verdict is xids.XidVerdict.GONE] == [79]


@pytest.mark.parametrize("code", [63, 74, 94, 154, 4711])
def test_what_only_a_log_could_decide_or_nobody_knows_is_noted(code: int) -> None:
    assert xids.find_xid(TABLE, code).verdict is xids.XidVerdict.NOTE


def test_every_code_has_a_meaning_and_a_source() -> None:
    assert len(TABLE) > 100
    assert all(x.meaning and x.source in ("catalogue", "unused", "header") for x in TABLE.values())


def test_a_table_that_cannot_be_used_names_the_code() -> None:
    with pytest.raises(ValueError, match="XID 48"):
        xids.parse_xids("48: {verdict: perhaps}")
