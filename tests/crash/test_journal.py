"""A long run that was stopped continues where it stopped; a finished one starts over."""

from pathlib import Path

from journal import Journal


def test_results_and_plan_are_there_for_the_next_run_without_naming_its_seed(
    tmp_path: Path,
) -> None:
    first = Journal("crash", 7, tmp_path)
    first.keep_plan(["a", "b"])
    first.keep("a", problem="", met="POST a")
    second = Journal("crash", 0, tmp_path)
    assert (second.seed, second.plan, second.resumed) == (7, ["a", "b"], 1)
    assert second.done["a"]["met"] == "POST a"


def test_a_finished_run_and_another_suite_are_not_gone_on_with(tmp_path: Path) -> None:
    first = Journal("crash", 7, tmp_path)
    first.keep("a", problem="")
    first.finish()
    assert Journal("crash", 0, tmp_path).resumed == 0
    assert Journal("store", 0, tmp_path).resumed == 0
    again = Journal("crash", 7, tmp_path)
    assert (again.seed, again.resumed) == (7, 0)


def test_half_a_line_of_a_run_that_was_cut_is_no_result(tmp_path: Path) -> None:
    first = Journal("crash", 7, tmp_path)
    first.keep("a", problem="")
    with first.path.open("a") as file:
        file.write('{"case": "b", "prob')
    assert list(Journal("crash", 7, tmp_path).done) == ["a"]
