"""A node's pages over time → its evidence and verdict."""

from dataclasses import replace

import pytest

from everstep_operator.evidence import MISSING, build_incident, covers
from everstep_operator.health.outcomes import FailureKind
from health_given import HEALTHY, START, A, B, History, a_failure, a_gpu, a_node, a_page

XID64 = a_page(a_gpu(A, xid=64, xid_counts={64: 1}), a_gpu(B))
LOST = a_page(a_gpu(B))
EMPTY = a_failure(FailureKind.EMPTY)


def test_a_healthy_node_has_nothing_against_it() -> None:
    finding = History().scrape(HEALTHY, HEALTHY, HEALTHY).finding()
    assert (finding.claims, finding.silent, finding.doubt) == ((), "", "")
    assert finding.present == {A, B}


def test_a_fatal_xid_that_appears_convicts_on_the_page_that_shows_it() -> None:
    history = History().scrape(HEALTHY, XID64)
    (claim,) = history.finding().claims
    assert (claim.state.value, claim.reason) == ("leaving", "GpuFatalXid")
    assert claim.evidence.first_seen == START + 2
    assert claim.evidence.appeared
    assert "XID 64" in claim.message
    assert A in claim.message
    assert claim.message.endswith(", since 1970-01-12T13:46:42Z"), "also readable days later"


def test_a_latched_xid_found_at_start_convicts_and_says_that_it_was_found() -> None:
    (claim,) = History().scrape(XID64).finding().claims
    assert claim.state.value == "leaving"
    assert not claim.evidence.appeared
    assert "found at" in claim.message


def test_gauge_and_count_of_one_fault_are_one_piece_of_evidence() -> None:
    late = a_page(a_gpu(A, xid=64), a_gpu(B))
    history = History().scrape(HEALTHY, late, XID64)
    assert [one.first_seen for one in history.evidence()] == [START + 2]


def test_a_latched_xid_stays_the_same_evidence_over_many_pages() -> None:
    history = History().scrape(HEALTHY, *[XID64] * 50)
    assert [one.first_seen for one in history.evidence()] == [START + 2]


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 74, 94, 4711])
def test_codes_of_applications_and_codes_to_note_convict_nobody(code: int) -> None:
    page = a_page(a_gpu(A, xid=code, xid_counts={code: 3}), a_gpu(B))
    assert History().scrape(HEALTHY, page, page).finding().claims == ()


def test_a_follower_that_overwrites_the_gauge_does_not_wash_the_cause_away() -> None:
    follower = a_page(a_gpu(A, xid=45), a_gpu(B))
    history = History().scrape(HEALTHY, a_page(a_gpu(A, xid=48), a_gpu(B)), follower, follower)
    assert [one.code for one in history.evidence()] == [48]


def test_a_follower_in_the_gauge_does_not_hide_the_cause_in_the_count() -> None:
    page = a_page(a_gpu(A, xid=45, xid_counts={62: 1, 45: 1}), a_gpu(B))
    assert [one.code for one in History().scrape(HEALTHY, page).evidence()] == [62]


def test_the_exporter_taking_the_xid_back_ends_the_evidence() -> None:
    assert History().scrape(HEALTHY, XID64, HEALTHY).finding().claims == ()


def test_only_a_page_without_any_code_shows_that_a_gpu_is_clear_of_xids() -> None:
    """A new operator process knows the codes before its first page only from NodeQuarantines."""
    history = History().scrape(XID64).restarted()
    assert not history.scrape(a_failure()).finding().clear, "no page was read"
    follower = a_page(a_gpu(A, xid=45), a_gpu(B))
    shown = history.scrape(follower).finding().clear
    assert (A, "xid") not in shown, "the follower may have overwritten another code"
    assert {(B, "xid"), (A, "double-bit-ecc"), (A, MISSING)} <= shown
    assert (A, "xid") in history.scrape(HEALTHY).finding().clear
    assert not history.rebooted().finding().clear


def test_a_page_clears_no_gpu_of_what_it_does_not_show() -> None:
    bare = a_gpu(A)
    values = {m: codes for m, codes in bare.values.items() if "XID" not in m}
    finding = History().scrape(a_page(replace(bare, values=values))).finding()
    assert finding.clear == {(A, MISSING), (A, "double-bit-ecc"), (A, "row-remap-failure")}


LATCHED = a_page(a_gpu(A, xid=64), a_gpu(B))
LEFT_OUT = a_page(
    *(
        replace(gpu, values={m: v for m, v in gpu.values.items() if m != "DCGM_FI_DEV_XID_ERRORS"})
        for gpu in HEALTHY.gpus.values()
    )
)
"""As dcgm-exporter 4.8.2 shows it from its start to the first XID."""


def test_a_restarted_exporter_that_leaves_the_xid_out_shows_none() -> None:
    assert History().scrape(HEALTHY, LATCHED, a_failure(), LEFT_OUT).states() == []


def test_an_xid_after_an_exporter_has_left_it_out_is_new_evidence() -> None:
    history = History().scrape(HEALTHY, LATCHED)
    history.answered(*history.evidence())
    assert history.scrape(LATCHED).states() == []
    assert history.scrape(a_failure(), LEFT_OUT, LATCHED).states() == ["leaving"]


def test_a_gpu_whose_values_are_all_left_out_is_not_free_of_its_xid() -> None:
    """DCGM shows no value of a GPU that no longer answers it."""
    history = History().scrape(HEALTHY, LATCHED)
    history.dated = False
    assert history.scrape(LEFT_OUT, LEFT_OUT).states() == ["leaving"]


def test_a_restarted_exporter_that_shows_the_xid_again_shows_a_new_one() -> None:
    first = History().scrape(HEALTHY, XID64)
    before = first.evidence()[0]
    again = first.scrape(HEALTHY, XID64).evidence()[0]
    assert not covers(before, again)


def test_silence_in_between_does_not_make_old_evidence_new() -> None:
    history = History().scrape(HEALTHY, XID64)
    before = history.evidence()[0]
    after = history.scrape(a_failure(), a_failure(), XID64).evidence()[0]
    assert covers(before, after)


def test_a_second_event_of_the_same_code_much_later_is_new_evidence() -> None:
    history = History().scrape(HEALTHY, *[XID64] * 10)
    before = history.evidence()[0]
    twice = a_page(a_gpu(A, xid=64, xid_counts={64: 2}), a_gpu(B))
    assert not covers(before, history.scrape(twice).evidence()[0])


def test_double_bit_errors_convict_when_they_rise_and_when_they_are_found() -> None:
    page = a_page(a_gpu(A, double_bit=1.0), a_gpu(B))
    risen = History().scrape(HEALTHY, page).evidence()[0]
    found = History().scrape(page).evidence()[0]
    assert (risen.kind, risen.appeared) == ("double-bit-ecc", True)
    assert (found.kind, found.appeared) == ("double-bit-ecc", False)


def test_a_volatile_counter_that_went_back_to_zero_is_forgotten() -> None:
    page = a_page(a_gpu(A, double_bit=2.0), a_gpu(B))
    assert History().scrape(page, HEALTHY).finding().claims == ()


def test_remap_failure_and_xid_64_together_are_one_incident() -> None:
    page = a_page(a_gpu(A, xid=64, remap_failed=True), a_gpu(B))
    history = History().scrape(HEALTHY, page)
    assert {one.kind for one in history.evidence()} == {"xid", "row-remap-failure"}
    assert build_incident(history.evidence()) == build_incident(history.evidence()[:1])


def test_a_gpu_missing_once_or_twice_is_suspect_and_at_three_pages_gone() -> None:
    history = History().scrape(HEALTHY)
    assert [history.scrape(LOST).states() for _ in range(4)] == [
        ["suspect"],
        ["suspect"],
        ["gone"],
        ["gone"],
    ]


def test_one_sample_that_an_exporter_serves_many_times_counts_once() -> None:
    """A scrape interval of 5 s meets an exporter that collects every 30 s."""
    history = History().scrape(HEALTHY, LOST).scrape(*[LOST] * 5, moving=False)
    assert history.states() == ["suspect"]
    assert history.scrape(LOST, LOST).states() == ["gone"]


def test_without_the_energy_counter_one_sample_counts_once_too() -> None:
    """The exporter collects every 30 s, and nothing on its page tells two samples apart."""
    history = History(dated=False).scrape(HEALTHY, *[LOST] * 30)
    assert history.states() == ["suspect"]
    assert history.scrape(*[LOST] * 30).states() == ["suspect"]
    assert history.scrape(LOST).states() == ["gone"]
    assert history.scrape(HEALTHY).states() == []


def test_a_gpu_that_was_swapped_is_not_missing() -> None:
    history = History(facts=a_node(expected=(A, B))).scrape(HEALTHY).rebooted()
    swapped = a_page(a_gpu("GPU-2a"), a_gpu(B))
    assert history.scrape(*[swapped] * 4).states() == []
    assert history.scrape(*[a_page(a_gpu(B))] * 3).states() == ["gone"], "the new one is expected"


def test_of_two_absent_gpus_one_new_gpu_replaces_only_one() -> None:
    history = History(facts=a_node(expected=(A, B))).scrape(HEALTHY).rebooted()
    assert history.scrape(*[a_page(a_gpu("GPU-2a"))] * 3).states() == ["gone"]


def test_the_suspicion_and_the_verdict_are_the_same_incident() -> None:
    history = History().scrape(HEALTHY, LOST)
    suspected = build_incident(history.evidence())
    assert build_incident(history.scrape(LOST, LOST).evidence()) == suspected


def test_a_gpu_that_flaps_never_reaches_three_pages() -> None:
    history = History().scrape(*[HEALTHY, LOST, LOST] * 10)
    assert history.states() == ["suspect"]
    assert history.scrape(HEALTHY).states() == []


def test_a_gpu_that_vanished_while_the_operator_was_away_is_missed() -> None:
    history = History(facts=a_node(expected=(A, B))).scrape(LOST, LOST, LOST)
    (claim,) = history.finding().claims
    assert (claim.state.value, claim.evidence.gpu, claim.evidence.appeared) == ("gone", A, False)


def test_failed_scrapes_do_not_count_as_pages_without_the_gpu() -> None:
    history = History().scrape(HEALTHY, LOST, a_failure(), a_failure(), a_failure(), LOST)
    assert history.states() == ["suspect"]


def test_the_pods_of_a_lost_gpu_are_remembered_from_its_last_page() -> None:
    held = a_page(a_gpu(A, pods=frozenset({"default/job-0-1"})), a_gpu(B))
    (claim,) = History().scrape(held, LOST, LOST, LOST).finding().claims
    assert claim.pods == ("default/job-0-1",)


def test_pages_that_show_no_gpu_at_all_are_silence_as_long_as_the_node_offers_its_gpus() -> None:
    """An exporter that still shows NVSwitches or CPUs is more often at fault than all GPUs at once."""
    finding = History().scrape(HEALTHY, *[a_page()] * 100).finding()
    assert (finding.claims, finding.silent_reason) == ((), "ExporterSilent")
    assert "the exporter's pages show no GPU, only other series: run nvidia-smi" in finding.silent


def test_pages_that_show_no_gpu_of_a_node_that_offers_none_any_more_mean_gone() -> None:
    history = History(facts=a_node(allocatable=0)).scrape(HEALTHY, *[a_page(), EMPTY] * 30)
    assert history.states() == []
    assert history.scrape(a_page()).states() == ["gone", "gone"]


def test_a_page_without_a_gpu_does_not_end_the_absence_of_one() -> None:
    history = History().scrape(HEALTHY, LOST, LOST, LOST, *[a_page()] * 5)
    assert history.states() == ["gone"]
    assert history.scrape(HEALTHY).states() == []


def test_an_exporter_of_a_node_without_gpus_is_not_silent() -> None:
    history = History(facts=a_node(gpus=0, allocatable=0)).scrape(*[a_page()] * 5)
    assert history.finding().silent == ""


def test_empty_pages_are_silence_as_long_as_the_node_offers_its_gpus() -> None:
    finding = History().scrape(HEALTHY, *[EMPTY] * 100).finding()
    assert finding.claims == ()
    assert finding.silent_reason == "ExporterSilent"


def test_empty_pages_of_a_node_that_offers_no_gpu_any_more_mean_gone() -> None:
    history = History(facts=a_node(allocatable=0))
    assert history.scrape(HEALTHY, *[EMPTY] * 61).states() == ["gone", "gone"]


def test_an_exporter_that_has_not_collected_twice_yet_convicts_nobody() -> None:
    """So it is while the GPU Operator replaces the exporter and the device plugin of a node: the new
    exporter is empty until it collects, by default after 30 s, and again if that fails.
    """
    history = History(facts=a_node(allocatable=0)).scrape(HEALTHY, *[a_failure()] * 5)
    assert history.scrape(*[EMPTY] * 60).states() == []
    assert history.scrape(EMPTY).states() == ["gone", "gone"]


def test_empty_pages_before_another_failure_do_not_count() -> None:
    history = History(facts=a_node(allocatable=0)).scrape(HEALTHY, *[EMPTY] * 50, a_failure())
    assert history.scrape(*[EMPTY] * 60).states() == []


def test_the_same_without_a_good_page_because_the_operator_is_new() -> None:
    history = History(facts=a_node(allocatable=0, expected=(A, B)))
    assert history.scrape(*[EMPTY] * 61).states() == ["gone", "gone"]


@pytest.mark.parametrize("kind", list(FailureKind))
def test_an_exporter_gone_silent_is_unknown_after_three_scrapes_and_never_more(
    kind: FailureKind,
) -> None:
    history = History().scrape(HEALTHY, a_failure(kind), a_failure(kind))
    assert history.finding().silent == ""
    finding = history.scrape(*[a_failure(kind)] * 500).finding()
    assert "is unknown" in finding.silent
    assert finding.claims == ()


def test_one_good_page_ends_the_silence() -> None:
    history = History().scrape(HEALTHY, *[a_failure()] * 9, HEALTHY)
    assert history.finding().silent == ""


def test_frozen_values_become_silence_but_only_if_they_ever_moved() -> None:
    moved = History().scrape(HEALTHY, HEALTHY).scrape(*[HEALTHY] * 130, moving=False)
    never = History().scrape(*[HEALTHY] * 130, moving=False)
    assert moved.finding().silent_reason == "ExporterFrozen"
    assert never.finding().silent == ""


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_is_set_freezes_no_values(seconds: float) -> None:
    history = History().scrape(HEALTHY, HEALTHY)
    history.now += seconds
    assert history.finding().silent == ""
    assert history.scrape(HEALTHY, moving=False).finding().silent == "", "the same sample again"
    frozen = history.scrape(*[HEALTHY] * 130, moving=False).finding()
    assert frozen.silent_reason == "ExporterFrozen"


def test_pages_that_nobody_has_read_are_not_frozen() -> None:
    """The API server did not answer the lists of exporter pods for minutes."""
    history = History().scrape(HEALTHY, HEALTHY)
    history.now, history.steady = history.now + 300.0, history.steady + 300.0
    assert history.finding().silent == ""
    assert history.scrape(HEALTHY).finding().silent == ""


def test_a_reboot_clears_latches_and_keeps_the_list_of_gpus() -> None:
    history = History().scrape(HEALTHY, XID64).rebooted().scrape(HEALTHY)
    assert history.states() == []
    assert history.scrape(LOST, LOST, LOST).states() == ["gone"]


def test_a_reboot_that_no_page_has_shown_yet_does_not_turn_old_evidence_into_new() -> None:
    history = History().scrape(HEALTHY, XID64, LOST, LOST, LOST).rebooted()
    assert history.states() == []


def test_a_failed_remap_outlives_the_reboot_as_the_same_evidence() -> None:
    page = a_page(a_gpu(A, remap_failed=True), a_gpu(B))
    history = History().scrape(HEALTHY, page)
    before = history.evidence()[0]
    after = history.rebooted().scrape(page).evidence()[0]
    assert covers(before, after)


def test_another_machine_under_the_same_name_starts_with_a_clean_slate() -> None:
    history = History().scrape(HEALTHY, XID64)
    history.facts = a_node(machine="machine-2", boot="boot-9")
    other = a_page(a_gpu("GPU-a2a"), a_gpu("GPU-b2b"))
    assert history.scrape(other).states() == []


def test_answered_evidence_never_convicts_again() -> None:
    history = History().scrape(HEALTHY, XID64)
    history.answered(*history.evidence())
    assert history.scrape(XID64, XID64).states() == []


def test_answered_evidence_does_not_convict_after_a_restart_of_the_operator() -> None:
    history = History().scrape(HEALTHY, XID64)
    history.answered(*history.evidence()).restarted()
    assert history.scrape(XID64, XID64).states() == []


def test_the_same_fault_come_anew_after_the_answer_convicts() -> None:
    history = History().scrape(HEALTHY, XID64)
    history.answered(*history.evidence())
    assert history.scrape(HEALTHY, XID64).states() == ["leaving"]


def test_another_fault_after_the_answer_convicts() -> None:
    history = History().scrape(HEALTHY, XID64)
    history.answered(*history.evidence())
    page = a_page(a_gpu(A, xid=95), a_gpu(B))
    assert [one.code for one in history.scrape(page).evidence()] == [95]


def test_a_missing_gpu_that_was_answered_comes_back_and_goes_again_convicts() -> None:
    history = History().scrape(HEALTHY, LOST, LOST, LOST)
    history.answered(*history.evidence())
    assert history.scrape(LOST).states() == []
    assert history.scrape(HEALTHY, LOST, LOST, LOST).states() == ["gone"]


def test_a_death_makes_the_node_doubtful_until_a_page_sampled_later_shows_all_gpus() -> None:
    history = History().scrape(HEALTHY, HEALTHY)
    history.died_at = history.now + 0.5
    assert "a rank died" in history.finding().doubt
    assert history.scrape(HEALTHY).finding().doubt  # may have been sampled before the death
    assert not history.scrape(HEALTHY).finding().doubt


def test_pages_that_repeat_an_old_sample_do_not_clear_the_doubt() -> None:
    history = History().scrape(HEALTHY, HEALTHY)
    history.died_at = history.now + 0.5
    assert history.scrape(*[HEALTHY] * 5, moving=False).finding().doubt


def test_the_doubt_about_a_silent_node_ends() -> None:
    history = History().scrape(HEALTHY, HEALTHY)
    history.died_at = history.now + 0.5
    assert not history.scrape(*[a_failure()] * 20).finding().doubt


def test_a_clock_that_is_set_back_ends_the_doubt() -> None:
    history = History().scrape(HEALTHY)
    history.died_at = history.now + 0.5
    history.now -= 3600.0
    assert not history.scrape(HEALTHY, HEALTHY).finding().doubt


def test_a_node_without_exporter_is_never_doubted() -> None:
    assert History(died_at=START).finding().doubt == ""


@pytest.mark.parametrize(
    ("expected", "states"),
    [
        pytest.param((A, B), ["gone"], id="it was back since it was answered"),
        pytest.param((B,), [], id="it was given up"),
    ],
)
def test_a_missing_gpu_that_was_answered_convicts_after_a_restart_only_if_it_was_back(
    expected: tuple[str, ...], states: list[str]
) -> None:
    history = History(facts=a_node(expected=(A, B))).scrape(HEALTHY, LOST, LOST, LOST)
    history.answered(*history.evidence())
    history.facts = replace(history.facts, expected=expected)
    assert history.restarted().scrape(LOST, LOST, LOST).states() == states
