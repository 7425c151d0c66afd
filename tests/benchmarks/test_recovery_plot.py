from pathlib import Path

from everstep_recovery import plot


def a_run(system: str, settings: str, seconds: float | None, **changes: object) -> plot.Row:
    row = {
        "system": system, "settings": settings, "problem": "", "limit": 120.0,
        "seconds_to_next_step": seconds, "seconds_to_full_size": seconds,
    }  # fmt: skip
    return row | changes


def test_a_run_that_did_not_end_in_time_is_a_point_at_the_limit() -> None:
    rows = [a_run("everstep", "in place", 0.2), a_run("torchrun", "as shipped", None)]
    points = plot.list_points(rows, "seconds_to_next_step")
    assert points == [
        plot.Point("everstep in place", 0.2, late=False),
        plot.Point("torchrun as shipped", 120.0, late=True),
    ]


def test_a_run_that_did_not_start_is_no_point() -> None:
    rows = [a_run("torchft", "tight", None, problem="no interpreter")]
    assert plot.list_points(rows, "seconds_to_full_size") == []


def test_the_picture_is_written(tmp_path: Path) -> None:
    rows = [a_run("everstep", "in place", s) for s in (0.2, 0.3)]
    rows += [a_run("torchrun", "own store", 9.0), a_run("torchrun", "as shipped", None)]
    plot.draw(tmp_path / "recovery.png", rows)
    assert (tmp_path / "recovery.png").read_bytes().startswith(b"\x89PNG")
