"""Parsing an exporter's page, whether complete, odd or broken, into values."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep_operator.health import parse
from everstep_operator.health.rules.registry import load_rules

PAGES = Path(__file__).parent / "pages"
METRICS = load_rules().metrics
FIELDS = (*METRICS, *parse.ALWAYS)


def shown(gpu: parse.GpuSample, name: str, code: int = 0) -> float | None:
    """The GPU's value of the metric whose name ends with `name`."""
    (metric,) = [metric for metric in METRICS if metric.endswith(name)]
    return gpu.values.get(metric, {}).get(code)


XID, COUNT, REMAP = "FI_DEV_XID_ERRORS", "EXP_XID_ERRORS_COUNT", "ROW_REMAP_FAILURE"
DOUBLE_BIT = "ECC_DBE_VOL_TOTAL"


def page(name: str) -> parse.Page:
    return parse.parse_page((PAGES / name).read_bytes(), METRICS)


def line(name: str, value: str, **labels: str) -> bytes:
    labels = {"gpu": "0", "UUID": "GPU-a", **labels}
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}\n".encode()


def only(body: bytes) -> parse.GpuSample:
    (gpu,) = parse.parse_page(body, METRICS).gpus.values()
    return gpu


def samples_of(body: bytes) -> list[tuple[str, str, float]]:
    return [
        (sample.name.removesuffix("_total"), repr(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    ]


def test_a_healthy_page_shows_every_gpu_without_a_fault() -> None:
    found = page("healthy.txt")
    assert [gpu.index for gpu in found.gpus.values()] == ["0", "1"]
    assert all(shown(gpu, XID) == 0 and not gpu.values.get(COUNT) for gpu in found.gpus.values())
    assert all(shown(gpu, DOUBLE_BIT) == 0 for gpu in found.gpus.values())
    assert all(shown(gpu, REMAP) == 0 for gpu in found.gpus.values())
    assert found.hostname == "node-1"
    assert found.bad_lines == 0


def test_pods_come_from_the_series_that_name_them() -> None:
    pods = [gpu.pods for gpu in page("healthy.txt").gpus.values()]
    assert pods == [frozenset({"default/byte-lm-0-1"}), frozenset()]


def test_xid_64_shows_as_gauge_as_count_and_with_the_remap_flag() -> None:
    bad = next(gpu for gpu in page("xid64.txt").gpus.values() if gpu.index == "0")
    assert (shown(bad, XID), shown(bad, COUNT, 64), shown(bad, REMAP)) == (64, 1, 1)


def test_a_gpu_that_is_lost_leaves_no_series_behind() -> None:
    assert [gpu.index for gpu in page("lost.txt").gpus.values()] == ["1"]


def test_the_default_csv_and_the_newer_hostname_label_are_enough() -> None:
    found = page("default_csv.txt")
    assert found.hostname == "node-1"
    assert all(shown(gpu, XID) == 0 and gpu.energy is not None for gpu in found.gpus.values())
    assert all(shown(gpu, DOUBLE_BIT) is None for gpu in found.gpus.values())


def test_the_old_namespace_with_spaces_between_labels_is_understood() -> None:
    gpu = only((PAGES / "old_namespace.txt").read_bytes())
    assert (shown(gpu, XID), gpu.pods) == (48, frozenset({"team-a/job-0-1"}))


@pytest.mark.parametrize("name", ["healthy.txt", "xid64.txt", "lost.txt", "default_csv.txt"])
def test_the_filter_loses_no_sample_that_the_whole_parser_sees(name: str) -> None:
    body = (PAGES / name).read_bytes()
    # Without a TYPE line the parser does not add "_total" to the names of counters.
    whole = [sample for sample in samples_of(body) if sample[0] in FIELDS]
    assert sorted(samples_of(parse.filter_lines(body, FIELDS))) == sorted(whole)


def test_the_filter_keeps_no_metric_that_merely_begins_like_one_of_ours() -> None:
    body = line("DCGM_FI_DEV_GPU_TEMP_LIMIT", "5") + line("DCGM_FI_DEV_GPU_TEMP", "40")
    assert parse.filter_lines(body, FIELDS) == line("DCGM_FI_DEV_GPU_TEMP", "40")


@pytest.mark.parametrize("blank", ["9223372036854775794", "2147483632", "NaN", "140737488355328.0"])
def test_numbers_that_mean_no_value_are_left_out(blank: str) -> None:
    gpu = only(line("DCGM_FI_DEV_XID_ERRORS", blank) + line("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", blank))
    assert (shown(gpu, XID), shown(gpu, DOUBLE_BIT)) == (None, None)


def test_a_shared_gpu_with_one_series_per_pod_is_one_gpu_with_two_pods() -> None:
    body = b"".join(
        line("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "1", namespace="a", pod=pod) for pod in ("x", "y")
    )
    gpu = only(body)
    assert (shown(gpu, DOUBLE_BIT), gpu.pods) == (1, frozenset({"a/x", "a/y"}))


def test_the_name_of_the_newer_dcgm_is_the_same_field() -> None:
    assert shown(only(line("DCGM_FI_DEV_XID_ERROR", "95")), "XID_ERROR") == 95


def test_a_broken_line_costs_only_itself() -> None:
    found = parse.parse_page(
        b'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-b" oops\n' + line("DCGM_FI_DEV_GPU_TEMP", "40"),
        METRICS,
    )
    assert (list(found.gpus), found.bad_lines) == (["GPU-a"], 1)


@pytest.mark.parametrize("code", ["", "a", "-1", "²", "٣", "7" * 5000])
def test_a_code_that_is_no_number_costs_only_its_series(code: str) -> None:
    body = line("DCGM_EXP_XID_ERRORS_COUNT", "1", xid=code) + line("DCGM_FI_DEV_GPU_TEMP", "40")
    assert shown(only(body), "XID_ERRORS_COUNT") is None


@pytest.mark.parametrize("body", [b"", b"\n \n"])
def test_an_empty_page_says_that_it_is_empty(body: bytes) -> None:
    with pytest.raises(parse.PageError, match="empty") as raised:
        parse.parse_page(body, METRICS)
    assert raised.value.empty


@pytest.mark.parametrize(
    "body",
    [b"<html>not found</html>", b"node_cpu_seconds_total 4\n", b"DCGM_FI_DEV_XID_ERRORS{broken\n"],
)
def test_what_is_no_page_of_an_exporter_is_quoted(body: bytes) -> None:
    with pytest.raises(parse.PageError, match="not a page of a dcgm-exporter") as raised:
        parse.parse_page(body, METRICS)
    assert not raised.value.empty


def test_a_page_of_headings_only_is_a_page_without_gpus() -> None:
    heading = b"# HELP DCGM_FI_DEV_GPU_TEMP x\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n"
    assert parse.parse_page(heading, METRICS).gpus == {}


@pytest.mark.parametrize("name", ["healthy.txt", "xid64.txt", "old_namespace.txt"])
def test_plain_lines_are_read_as_the_official_parser_reads_them(name: str) -> None:
    body = (PAGES / name).read_bytes()
    lines = [line for line in body.decode().split("\n") if line and not line.startswith("#")]
    ours = [sample for line in lines for sample in parse._parse_line(line)]
    read = [(s.name.removesuffix("_total"), repr(sorted(s.labels.items())), s.value) for s in ours]
    assert sorted(read) == sorted(samples_of(body))


@pytest.mark.parametrize(
    ("text", "value"),
    [('{UUID="a\\"b"} 3', 3.0), ('{ UUID="a" } 3', 3.0), ('{UUID="a",} 3', 3.0), (" 1e3", 1000.0)],
)
def test_what_is_not_plain_is_left_to_the_official_parser(text: str, value: float) -> None:
    (found,) = parse._parse_line(f"DCGM_FI_DEV_GPU_TEMP{text}")
    assert found.value == value
    with pytest.raises(ValueError, match=r"."):
        parse._parse_line(f"DCGM_FI_DEV_GPU_TEMP{text}x")


@pytest.mark.parametrize(
    "odd",
    [
        b'DCGM_FI_DEV_GPU_TEMP{gpu="0", ="x"} 40\n',
        b'DCGM_FI_DEV_GPU_TEMP{ gpu="0", UUID="GPU-a"} ' + b"9" * 400 + b"\n",
    ],
    ids=["an empty label name", "an integer that no float can hold"],
)
def test_a_line_that_the_library_fails_on_costs_only_itself(odd: bytes) -> None:
    found = parse.parse_page((PAGES / "healthy.txt").read_bytes() + odd, METRICS)
    assert len(found.gpus) >= 2


def test_a_page_of_other_metrics_is_no_page_without_gpus() -> None:
    """Else an exporter with another list of metrics would turn every GPU of its node into a lost one."""
    utilisation = line("DCGM_FI_DEV_GPU_UTIL", "3") + line("DCGM_FI_PROF_SM_ACTIVE", "0.5")
    with pytest.raises(parse.PageError, match="none of the metrics that Everstep reads") as caught:
        parse.parse_page(utilisation, METRICS)
    assert not caught.value.empty


def test_a_page_with_temperature_and_energy_alone_shows_no_healthy_gpus() -> None:
    """Most lists of metrics have these two, but no rule finds a fault in them."""
    body = line("DCGM_FI_DEV_GPU_TEMP", "40") + line(parse.ENERGY, "5")
    with pytest.raises(parse.PageError, match=r"add them \(DCGM_FI_DEV_XID_ERRORS, ") as found:
        parse.parse_page(body, METRICS)
    assert "dcgm-exporter 4.8.2 leaves some out" in str(found.value)
