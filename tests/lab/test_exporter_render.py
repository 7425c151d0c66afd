"""The exporter's page as a function of GPU state and time, in the format that operators parse."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep_lab.exporter.gpu import (
    FAIL,
    WARN,
    Gpu,
    build_gpu,
    reload_driver,
    with_incident,
    with_xid,
)
from everstep_lab.exporter.render import Holder, Options, render

GOLDEN = Path(__file__).with_name("pages") / "dcgm_exporter.txt"
HOLDER = Holder(container="trainer", namespace="team-a", pod="byte-lm-0-1")


def a_gpu(index: int = 0) -> Gpu:
    return build_gpu(0, "node-1", index)


def page(*gpus: Gpu, now: float = 100.0, options: Options | None = None) -> str:
    return render(
        gpus, node="node-1", holders={a_gpu(0).uuid: HOLDER}, now=now, options=options or Options()
    )


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each line of one metric, read with the public parser."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in (name, f"{name}_total")
    ]


def test_the_page_of_a_node_with_a_failed_remap_is_the_golden_one() -> None:
    failing = with_xid(replace(a_gpu(0), remap_failure=1, recovery_action=1), 64, now=90.0)
    failing = with_incident(failing, "MEM", FAIL, "DCGM_FR_ROW_REMAP_FAILURE")
    assert page(failing, a_gpu(1)) == GOLDEN.read_text()


def test_the_xid_gauge_starts_at_zero_with_its_text() -> None:
    labels, value = samples(page(a_gpu()), "DCGM_FI_DEV_XID_ERRORS")[0]
    assert (value, labels["err_code"], labels["err_msg"]) == (0, "0", "No Error")


def test_labels_come_in_the_exporters_order() -> None:
    line = next(x for x in page(a_gpu()).splitlines() if x.startswith("DCGM_FI_DEV_XID_ERRORS{"))
    names = [part.partition("=")[0] for part in line.partition("{")[2].split('",')]
    assert [name.strip('"} 0') for name in names] == [
        "gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION",
        "err_code", "err_msg", "container", "namespace", "pod",
    ]  # fmt: skip


def test_a_later_xid_overwrites_the_gauge_and_the_window_keeps_both() -> None:
    gpu = with_xid(with_xid(a_gpu(), 94, now=10.0), 45, now=10.1)
    text = page(gpu, now=20.0)
    assert samples(text, "DCGM_FI_DEV_XID_ERRORS")[0][1] == 45
    counts = {x["xid"]: n for x, n in samples(text, "DCGM_EXP_XID_ERRORS_COUNT")}
    assert counts == {"45": 1, "94": 1}


def test_the_count_leaves_the_window_after_five_minutes_and_the_gauge_stays() -> None:
    gpu = with_xid(a_gpu(), 79, now=10.0)
    text = page(gpu, now=310.5)
    counts = samples(text, "DCGM_EXP_XID_ERRORS_COUNT")
    assert [(x.get("xid"), n) for x, n in counts] == [(None, 0)]
    assert samples(text, "DCGM_FI_DEV_XID_ERRORS")[0][1] == 79


def test_a_lost_gpu_takes_all_its_series_with_it_and_leaves_the_others() -> None:
    text = page(replace(a_gpu(0), present=False), a_gpu(1))
    assert a_gpu(0).uuid not in text
    assert a_gpu(1).uuid in text


def test_a_node_without_any_gpu_left_has_an_empty_page() -> None:
    assert page(replace(a_gpu(), present=False)) == ""


def test_health_shows_every_watch_and_of_two_incidents_the_last() -> None:
    gpu = with_incident(a_gpu(), "MEM", WARN, "DCGM_FR_CONTAINED_ERROR")
    gpu = with_incident(gpu, "MEM", FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED")
    shown = samples(page(gpu), "DCGM_EXP_GPU_HEALTH_STATUS")
    health = {x["health_watch"]: (n, x["health_error_code"]) for x, n in shown}
    assert health["MEM"] == (20, "DCGM_FR_VOLATILE_DBE_DETECTED")
    assert health["PCIE"] == (0, "")
    assert len(health) == 11


def test_a_driver_reload_clears_what_is_volatile_and_keeps_what_the_inforom_holds() -> None:
    gpu = replace(
        with_xid(a_gpu(), 48, now=1.0), dbe_volatile=1, dbe_aggregate=1, remap_pending=1,
        remapped_uncorrectable=2, remap_failure=1, recovery_action=1, device_healthy=False,
    )  # fmt: skip
    after = reload_driver(gpu, now=50.0)
    assert (after.xid, after.dbe_volatile, after.remap_pending, after.recovery_action) == (0,) * 4
    assert (after.dbe_aggregate, after.remapped_uncorrectable, after.remap_failure) == (1, 2, 1)
    assert after.device_healthy
    assert after.uuid == gpu.uuid


def test_the_default_csv_has_the_remap_flag_but_no_health_metrics() -> None:
    text = page(a_gpu(), options=Options(csv="default"))
    assert "DCGM_FI_DEV_ROW_REMAP_FAILURE" in text
    assert "DCGM_FI_DEV_XID_ERRORS" in text
    for absent in ("DCGM_EXP_", "ECC_DBE", "REMAP_PENDING", "RECOVERY_ACTION"):
        assert absent not in text


def test_newer_exporters_spell_hostname_small() -> None:
    text = page(a_gpu(), options=Options(hostname_label="hostname"))
    assert 'hostname="node-1"' in text
    assert "Hostname=" not in text


def test_an_idle_gpu_has_no_pod_labels() -> None:
    idle = samples(page(a_gpu(0), a_gpu(1)), "DCGM_FI_DEV_GPU_UTIL")[1]
    assert "pod" not in idle[0]
    assert idle[1] == 0


@pytest.mark.parametrize("now", [0.0, 13.7, 1e6])
def test_power_capping_under_load_stays_harmless_at_any_time(now: float) -> None:
    text = page(a_gpu(), now=now)
    assert 35 <= samples(text, "DCGM_FI_DEV_GPU_TEMP")[0][1] <= 82
    assert samples(text, "DCGM_FI_DEV_THERMAL_VIOLATION")[0][1] == 0


def test_the_same_seed_gives_the_same_uuids_and_another_seed_others() -> None:
    assert build_gpu(1, "node-1", 0).uuid == build_gpu(1, "node-1", 0).uuid
    assert len({build_gpu(s, n, i).uuid for s in (0, 1) for n in ("a", "b") for i in (0, 1)}) == 8
