"""The kubelet's decisions as plain values: environment, paths, volumes, devices, phase, back-off."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everstep_contract.env import AGENT_SOCKET
from everstep_lab.exporter.gpu import build_gpu
from everstep_lab.node import environment, status, volumes
from everstep_lab.node.backoff import Backoff, BackoffRule, is_restarted
from everstep_lab.node.devices import choose_devices, count_wanted
from everstep_lab.node.environment import Place, Sources, build_env, expand
from everstep_lab.node.errors import ConfigError, NotSimulatedError
from everstep_lab.node.holders import Candidate, choose_holder
from everstep_lab.node.kubelet_port import Wanted, parse_wanted, read_lines
from everstep_lab.node.requests import check_request
from everstep_lab.node.rewrite import Paths
from everstep_lab.seam import BadRequestError, FaultRequest, NodeSpec

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
PLACE = Place(node="node-1", host_ip="127.64.0.1", pod_ip="127.64.1.10")
SOURCES = Sources(
    config_maps={"conf": {"greeting": b"hello"}}, secrets={"keys": {"password": b"s3cret"}}
)


def a_pod(**spec: Any) -> dict[str, Any]:
    meta = {"name": "p", "namespace": "ns", "uid": "u-1", "labels": {"a": "1"}}
    return {"metadata": meta, "spec": {"containers": [{"name": "c"}], **spec}}


def env_of(*entries: dict[str, Any], **container: Any) -> dict[str, str]:
    return build_env({"name": "c", "env": list(entries), **container}, a_pod(), SOURCES, PLACE)


# --- environment --------------------------------------------------------------------------------


def test_values_come_from_config_maps_secrets_and_the_downward_api() -> None:
    assert env_of(
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "greeting"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "password"}}},
        {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}},
    ) == {"A": "hello", "B": "s3cret", "C": "127.64.1.10", "D": "1"}


def test_a_reference_sees_only_what_stands_before_it() -> None:
    assert env_of(
        {"name": "EARLY", "value": "$(LATE)"}, {"name": "LATE", "value": "x"},
        {"name": "BOTH", "value": "$(EARLY)/$(LATE)"},
    )["BOTH"] == "$(LATE)/x"  # fmt: skip


def test_a_doubled_dollar_is_one_dollar() -> None:
    assert expand("$$(A) $(A) $(B)", {"A": "1"}) == "$(A) 1 $(B)"


def test_env_from_takes_all_keys_with_a_prefix() -> None:
    env = env_of(envFrom=[{"prefix": "S_", "secretRef": {"name": "keys"}}])
    assert env == {"S_password": "s3cret"}


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ({"name": "nope", "key": "k"}, 'secret "nope" not found'),
        ({"name": "keys", "key": "k"}, "couldn't find key k in secret ns/keys"),
    ],
)
def test_a_missing_secret_or_key_is_named(reference: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        env_of({"name": "A", "valueFrom": {"secretKeyRef": reference}})


def test_an_optional_reference_that_leads_nowhere_sets_nothing() -> None:
    reference = {"name": "nope", "key": "k", "optional": True}
    assert env_of({"name": "A", "valueFrom": {"secretKeyRef": reference}}) == {}


def test_resources_are_given_in_units_of_the_divisor_rounded_up() -> None:
    container = {"name": "c", "resources": {"limits": {"memory": "1500Mi", "cpu": "1500m"}}}
    gib = {"resource": "limits.memory", "divisor": "1Gi"}
    assert environment.resource_value(gib, container) == "2"
    assert environment.resource_value({"resource": "limits.cpu"}, container) == "2"


# --- paths --------------------------------------------------------------------------------------

PATHS = Paths({"/data": "/host/d", "/data/cache": "/host/c", "/dev/termination-log": "/host/t"})


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("/data", "/host/d"),
        ("/data/x.bin", "/host/d/x.bin"),
        ("/data/cache/y", "/host/c/y"),
        ("--out=/data/z,/data/cache", "--out=/host/d/z,/host/c"),
        ("file:///data/run", "file:///host/d/run"),
        ("open('/data/a')", "open('/host/d/a')"),
        ("/dev/termination-log", "/host/t"),
        ("/database", "/database"),
        ("/data-old", "/data-old"),
        ("/mnt/data", "/mnt/data"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("relative/data", "relative/data"),
    ],
)
def test_a_mount_path_is_replaced_where_it_stands_as_a_path(text: str, becomes: str) -> None:
    assert PATHS.rewrite(text) == becomes


# --- volumes ------------------------------------------------------------------------------------


def test_a_volume_of_another_kind_is_refused_with_the_kinds_there_are() -> None:
    spec = a_pod(volumes=[{"name": "h", "hostPath": {"path": "/"}}])["spec"]
    with pytest.raises(NotSimulatedError, match=r"hostPath volumes \(volume \"h\"\); it has empty"):
        volumes.check_pod(spec)


def test_the_token_volume_that_the_api_server_adds_is_no_obstacle() -> None:
    volumes.check_pod(a_pod(volumes=[{"name": "kube-api-access-x", "projected": {}}])["spec"])


def test_init_containers_are_refused_in_words() -> None:
    with pytest.raises(NotSimulatedError, match="initContainers"):
        volumes.check_pod(a_pod(initContainers=[{"name": "i"}])["spec"])


def test_items_pick_keys_and_give_them_paths() -> None:
    item = {"key": "greeting", "path": "deep/hello.txt"}
    volume = {"name": "v", "configMap": {"name": "conf", "items": [item]}}
    files = volumes.build_files(volume, a_pod(), SOURCES, PLACE)
    assert files == {"deep/hello.txt": b"hello"}


def test_references_are_found_in_volumes_env_and_env_from() -> None:
    container = {
        "name": "c",
        "envFrom": [{"secretRef": {"name": "s1"}}],
        "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m1", "key": "k"}}}],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "v", "secret": {"secretName": "s2"}}],
    }
    assert volumes.list_references(spec) == ({"m1"}, {"s1", "s2"})


# --- devices ------------------------------------------------------------------------------------


def test_devices_come_in_order_without_the_held_and_the_unhealthy() -> None:
    gpus = [build_gpu(0, "n", i) for i in range(3)]
    assert choose_devices(gpus, {gpus[0].uuid}, 2) == [gpus[1].uuid, gpus[2].uuid]
    assert choose_devices(gpus, {gpus[0].uuid}, 3) is None


def test_devices_are_counted_from_the_limits() -> None:
    assert count_wanted({"resources": {"limits": {"nvidia.com/gpu": "2"}}}) == 2
    assert count_wanted({}) == 0


def a_process(pid: int, parent: int, **env: str) -> Candidate:
    return Candidate(pid=pid, parent=parent, age=1.0, env=env)


def test_the_holder_is_the_worker_with_the_gpus_local_rank_and_not_its_loader() -> None:
    agent = a_process(1, 0)
    first = a_process(12, 1, **{AGENT_SOCKET: "s", "LOCAL_RANK": "0"})
    second = a_process(11, 1, **{AGENT_SOCKET: "s", "LOCAL_RANK": "1"})
    loader = a_process(13, 12, **{AGENT_SOCKET: "s", "LOCAL_RANK": "0"})
    alive = [agent, second, first, loader]
    assert choose_holder(1, alive, position=0, gpus=2) == first
    assert choose_holder(1, alive, position=1, gpus=2) == second


def test_one_worker_holds_all_gpus_of_its_pod() -> None:
    alive = [a_process(1, 0), a_process(2, 1, **{AGENT_SOCKET: "s"})]
    assert choose_holder(1, alive, position=3, gpus=4) == alive[1]


def test_without_workers_the_main_process_holds_the_gpus() -> None:
    alive = [a_process(1, 0), a_process(2, 1)]
    assert choose_holder(1, alive, position=0, gpus=1) == alive[0]


# --- phase, status, restarts --------------------------------------------------------------------


def ended(code: int) -> status.Terminated:
    return status.Terminated(
        exit_code=code, reason="Error" if code else "Completed", started_at=NOW, finished_at=NOW,
        container_id="lab://1",
    )  # fmt: skip


def a_container(state: status.State, last: status.Terminated | None = None) -> status.Container:
    return status.Container(name="c", image="i", state=state, last=last)


WAITING = a_container(status.Waiting(reason="ContainerCreating"))
RUNNING = a_container(status.Running(started_at=NOW))
LOOPING = a_container(status.Waiting(reason="CrashLoopBackOff"), last=ended(1))


@pytest.mark.parametrize(
    ("policy", "containers", "phase"),
    [
        ("Always", [WAITING], "Pending"),
        ("Always", [RUNNING, WAITING], "Pending"),
        ("OnFailure", [RUNNING], "Running"),
        ("OnFailure", [LOOPING], "Running"),
        ("OnFailure", [a_container(ended(1))], "Running"),
        ("OnFailure", [a_container(ended(0))], "Succeeded"),
        ("Always", [a_container(ended(0))], "Running"),
        ("Never", [a_container(ended(0)), a_container(ended(3))], "Failed"),
        ("Never", [a_container(ended(0)), RUNNING], "Running"),
    ],
)
def test_the_phase_follows_containers_and_policy(
    policy: str, containers: list[status.Container], phase: str
) -> None:
    assert status.choose_phase(policy, containers) == phase


def test_a_pod_being_deleted_ends_whatever_its_policy() -> None:
    assert status.choose_phase("Always", [a_container(ended(0))], deleted=True) == "Succeeded"
    assert status.choose_phase("Always", [a_container(ended(137))], deleted=True) == "Failed"


def pod_state(*containers: status.Container) -> status.PodState:
    return status.PodState(
        containers=containers, host_ip="h", pod_ip="p", start_time=NOW - timedelta(seconds=9)
    )


def conditions(built: dict[str, Any]) -> dict[str, Any]:
    return {condition["type"]: condition for condition in built["conditions"]}


def test_a_condition_keeps_its_time_while_it_stays_the_same() -> None:
    pod = a_pod()
    pod["status"] = status.build_status(pod, pod_state(RUNNING), NOW)
    later = status.build_status(pod, pod_state(RUNNING), NOW + timedelta(seconds=60))
    assert conditions(later)["Ready"] == conditions(pod["status"])["Ready"]


def test_conditions_of_others_are_kept() -> None:
    pod = a_pod()
    theirs = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    pod["status"] = {"conditions": [theirs]}
    assert theirs in status.build_status(pod, pod_state(RUNNING), NOW)["conditions"]


def test_a_finished_pod_is_unready_because_it_is_completed() -> None:
    built = status.build_status(a_pod(), pod_state(a_container(ended(0))), NOW)
    assert conditions(built)["Ready"]["reason"] == "PodCompleted"


def test_the_first_restart_is_at_once_then_ten_seconds_doubling_to_five_minutes() -> None:
    backoff = Backoff(rule=BackoffRule())
    delays = []
    for _ in range(8):
        backoff = backoff.after(1.0)
        delays.append(backoff.delay)
        backoff = backoff.next()
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]


def test_ten_good_minutes_are_forgiven() -> None:
    assert Backoff(rule=BackoffRule(), delay=160).after(600).delay == 0


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [("Always", 0, True), ("OnFailure", 0, False), ("OnFailure", 1, True), ("Never", 1, False)],
)
def test_the_policy_decides_on_a_restart(policy: str, code: int, again: bool) -> None:
    assert is_restarted(policy, code) is again


# --- logs ---------------------------------------------------------------------------------------

LOG = (
    b"2026-05-04T12:00:00.000000001Z stdout F one\n"
    b"2026-05-04T12:00:05.000000001Z stderr P long \n"
    b"2026-05-04T12:00:05.000000002Z stderr F line\n"
    b"2026-05-04T12:00:09.000000001Z stdout F \n"
)


def shown(**query: str) -> bytes:
    wanted = parse_wanted(query, NOW + timedelta(seconds=10))
    return b"".join(read_lines(LOG, wanted))


def test_a_log_is_shown_without_its_bookkeeping_and_parts_are_joined() -> None:
    assert shown() == b"one\nlong line\n\n"


def test_a_tail_and_a_since_cut_the_log() -> None:
    assert shown(tailLines="1") == b"\n"
    assert shown(sinceSeconds="6") == b"long line\n\n"
    assert shown(tailLines="0") == b""


def test_timestamps_are_shown_when_asked_for() -> None:
    first = b"".join(read_lines(LOG[:46], Wanted(timestamps=True)))
    assert first.startswith(b"2026-05-04T12:00:00.000000001Z one")


# --- requests -----------------------------------------------------------------------------------

SPEC = NodeSpec(index=1, name="node-1", ip="i", pod_prefix="p.", gpus=2, token="t")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (FaultRequest(gpu=2, xid=79), "has no GPU 2: it has 0 to 1"),
        (FaultRequest(exporter="loud"), "exporter 'loud': choose one of silent"),
        (FaultRequest(gpu=1), "name the fault with --xid"),
        (FaultRequest(), "--xid, --exporter, --kill-node, --partition or --freeze-node"),
    ],
)
def test_a_fault_that_cannot_be_played_is_refused_with_what_can(
    request_: FaultRequest, says: str
) -> None:
    with pytest.raises(BadRequestError, match=says):
        check_request(SPEC.name, SPEC.gpus, request_)
