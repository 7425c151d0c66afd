"""What the kind lab requests, as plain values. The stories in e2e/ show that it works."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_lab.kind import images, manifests, places, tools
from everstep_lab.kind.operator import build_install
from everstep_lab.kind.present import render_kind_status, render_kind_up
from everstep_lab.seam import LabError
from everstep_operator.settings import Settings

STORE = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}
DEFAULTS = Settings()
PLACES = places.KindPlaces(cluster="everstep", root=Path("/nowhere"))


def objects() -> dict[str, dict[str, Any]]:
    built = manifests.build_objects(gpus=2, seed=7, store=STORE, data_node="cp")
    return {one["kind"]: one for one in built}


def test_every_worker_shows_the_hosts_packages_and_only_they() -> None:
    cluster = manifests.build_cluster(nodes=2, grace_seconds=16, packages="/p", store_port=31000)
    control, *workers = cluster["nodes"]
    assert "extraMounts" not in control
    assert [node["extraMounts"] for node in workers] == [
        [{"hostPath": "/p", "containerPath": places.PYTHON_TREE, "readOnly": True}]
    ] * 2


def test_the_store_is_reachable_from_this_host_alone() -> None:
    cluster = manifests.build_cluster(nodes=0, grace_seconds=16, packages="/p", store_port=31000)
    (mapping,) = cluster["nodes"][0]["extraPortMappings"]
    assert mapping["listenAddress"] == "127.0.0.1"


@pytest.mark.parametrize("grace", [2, 8, 50])
def test_a_kubelet_renews_its_lease_several_times_within_the_grace(grace: int) -> None:
    cluster = manifests.build_cluster(nodes=1, grace_seconds=grace, packages="/p", store_port=31000)
    kubeadm, kubelet = map(yaml.safe_load, cluster["kubeadmConfigPatches"])
    arguments = {a["name"]: a["value"] for a in kubeadm["controllerManager"]["extraArgs"]}
    assert arguments["node-monitor-grace-period"] == f"{grace}s"
    assert kubelet["nodeLeaseDurationSeconds"] / 4 <= grace / 2


def test_the_lab_node_stays_on_tainted_workers_and_off_the_control_plane() -> None:
    pod = objects()["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert "node-role.kubernetes.io/control-plane" in str(pod["affinity"])
    assert pod["hostPID"] is True


def test_the_operator_believes_the_exporter_as_it_is_installed() -> None:
    daemonset = objects()["DaemonSet"]
    assert daemonset["metadata"]["namespace"] in DEFAULTS.exporter_namespace_list
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert "app.kubernetes.io/name=dcgm-exporter" in DEFAULTS.exporter_selector_list
    assert labels["app.kubernetes.io/name"] == "dcgm-exporter"


def test_a_host_port_and_a_secret_name_the_store_by_what_each_side_sees() -> None:
    secret = manifests.build_store_secret({"AWS_REGION": "r"}, "team-a")
    assert secret["metadata"] == {"name": "object-store", "namespace": "team-a"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("node-1", "everstep-worker"),
        ("node-3", "everstep-worker3"),
        ("everstep-worker2", "everstep-worker2"),
        ("node-4", None),
        ("everstep-control-plane", None),
    ],
)
def test_a_node_goes_by_both_names(typed: str, meant: str | None) -> None:
    assert places.choose_node(PLACES, 3, typed) == meant


def test_each_network_has_a_cluster_of_its_own() -> None:
    first, second = (
        places.KindPlaces.from_env(env) for env in ({}, {"EVERSTEP_LAB_NETWORK": "77"})
    )
    assert (first.cluster, second.cluster) == ("everstep", "everstep-77")
    assert first.root != second.root


def test_an_image_is_built_anew_when_a_name_a_mode_or_a_content_changed() -> None:
    here = Path(__file__).resolve()
    both = [here, here.with_name("test_kind_labnode.py")]
    assert images.hash_inputs(both, []) == images.hash_inputs(reversed(both), [])
    different = {
        images.hash_inputs(files, more)
        for files, more in ((both, []), (both[:1], []), (both, ["x"]), ([], []))
    }
    assert len(different) == 4


def test_everything_that_an_image_is_made_of_exists() -> None:
    for image in images.list_images(Path("/nowhere")):
        assert images._files(images.REPOSITORY, (image.dockerfile, *image.inputs))


def test_a_mirror_and_proxies_of_the_host_reach_the_build() -> None:
    assert images.build_arguments({"HTTPS_PROXY": "p", "HOME": "/"}, "mirror") == [
        "--build-arg", "HTTPS_PROXY=p", "--build-arg", "PIP_INDEX_URL=mirror",
    ]  # fmt: skip


def test_the_operator_is_installed_armed_with_further_flags_last() -> None:
    arguments = build_install(["--cordon-budget=2"])
    assert "observeOnly=false" in arguments
    assert arguments[-1].endswith('"--cordon-budget=2"]')


def test_a_missing_program_is_named_with_the_place_where_it_is_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LabError, match=r"needs kind, which is not on the PATH: see https://kind"):
        tools.find("kind")


def test_a_command_that_fails_is_shown_with_its_last_words() -> None:
    with pytest.raises(LabError, match=r"`sh -c .*failed with 3:\nno such thing"):
        tools.run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_the_status_shows_what_is_broken() -> None:
    status = {
        "cluster": "everstep", "kubeconfig": "/k", "kubectl": "kubectl",
        "operator": {"pods": [{"name": "op-1", "ready": False}]},
        "objectstore": {"environment": {"AWS_ENDPOINT_URL": "http://s"}, "bucket": "b"},
        "nodes": {
            "everstep-worker": {
                "powered": True, "connected": False, "exporter": "ok", "faults": ["GPU 0, XID 79"],
                "gpus": [
                    {"index": 0, "present": False, "healthy": False, "xid": 0, "pod": "job-0-0"}
                ],
            },
            "everstep-worker2": {"powered": False, "connected": True, "exporter": "off"},
        },
    }  # fmt: skip
    shown = render_kind_status(status)
    assert "op-1 (not ready)" in shown
    assert "0: job-0-0, lost" in shown
    assert "  cut off from the API server\n  GPU 0, XID 79\n" in shown
    assert shown.endswith("off\n  no power")


def test_up_says_how_to_go_on() -> None:
    shown = render_kind_up(
        {
            "up_seconds": 61.23, "cluster": "everstep", "kubeconfig": "/k",
            "config": {"nodes": 3, "gpus_per_node": 1},
        }
    )  # fmt: skip
    assert "up after 61.2 s" in shown
    assert "3 nodes with 1 GPU each" in shown
