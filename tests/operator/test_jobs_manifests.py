"""Building a worker pod's manifest from the template."""

import copy
from typing import Any

import pytest

from everstep_contract.env import AgentEnv
from everstep_contract.units import Mesh
from everstep_operator import model
from everstep_operator.jobs import conditions, manifests
from job_builders import NOW, TEMPLATE, UID, a_job, a_spec, an_observation


def built(spec: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    job = a_job(spec)
    assert job.spec is not None
    return manifests.build_pod(job, job.spec, 2, 5, **kwargs)


def trainer(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["spec"]["containers"][0]
    return found


def with_template(change: Any) -> dict[str, Any]:
    template = copy.deepcopy(TEMPLATE)
    change(template["spec"])
    spec = a_spec()
    return {**spec, "workers": {**spec["workers"], "template": template}}


def test_the_agent_reads_back_what_the_operator_wrote() -> None:
    env = {e["name"]: e.get("value") or "filled in" for e in trainer(built())["env"]}
    read = AgentEnv.from_env(env)
    assert (read.job, read.job_uid, read.slot, read.attempt) == ("team/lm", UID, 2, 5)
    assert (read.uri, read.run, read.save_every_steps, read.save_every_seconds) == (
        "s3://bucket/folder", "team/lm", 25, 0,
    )  # fmt: skip
    assert read.grace_seconds == 55


def test_all_pods_are_told_how_ranks_form_units() -> None:
    spec = a_spec(replicas=4, parallelism={"shard": 2, "tensor": 2})
    env = {e["name"]: e.get("value") or "filled in" for e in trainer(built(spec))["env"]}
    assert env["EVERSTEP_MESH"] == "shard=2,tensor=2"
    assert AgentEnv.from_env(env).mesh == Mesh(shard=2, tensor=2)


@pytest.mark.parametrize(("run", "given"), [(None, 0), ("team/lm", 1), ("team/old", 1)])
def test_agents_are_told_whether_the_spec_names_the_run(run: str | None, given: int) -> None:
    checkpoint = a_spec()["checkpoint"] | ({"run": run} if run else {})
    env = {e["name"]: e.get("value") for e in trainer(built(a_spec(checkpoint=checkpoint)))["env"]}
    assert env["EVERSTEP_RUN_GIVEN"] == str(given)


@pytest.mark.parametrize(("notice", "left"), [(0, 1), (2, 1.8), (10, 9), (60, 55), (600, 595)])
def test_agents_get_most_of_a_short_notice(notice: float, left: float) -> None:
    assert manifests.choose_agent_grace(notice) == left


def test_token_and_address_come_from_the_kubelet() -> None:
    env = {e["name"]: e for e in trainer(built())["env"]}
    assert env["EVERSTEP_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == manifests.secret_name(
        "lm", UID
    )
    assert env["EVERSTEP_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_name_labels_and_owner_say_whose_it_is() -> None:
    body = built()
    assert body["metadata"]["name"] == "lm-2-5"
    assert body["metadata"]["labels"]["everstep.dev/slot"] == "2"
    assert body["metadata"]["labels"]["everstep.dev/attempt"] == "5"
    assert [(o["uid"], o["controller"]) for o in body["metadata"]["ownerReferences"]] == [
        (UID, True)
    ]


def test_the_memory_volume_is_added_to_the_memory_limit() -> None:
    body = built()
    assert trainer(body)["resources"]["limits"]["memory"] == str(5 * 2**30)
    volumes = {v["name"]: v["emptyDir"] for v in body["spec"]["volumes"]}
    assert volumes["everstep-memory"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {m["mountPath"] for m in trainer(body)["volumeMounts"]} == {
        "/everstep/memory",
        "/dev/shm",
    }


def test_a_shm_of_the_users_own_stays() -> None:
    def change(spec: dict[str, Any]) -> None:
        spec["volumes"] = [{"name": "mine", "emptyDir": {"medium": "Memory"}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]

    assert [v["name"] for v in built(with_template(change))["spec"]["volumes"]] == [
        "mine",
        "everstep-memory",
    ]


def test_it_holds_no_kubernetes_credentials_and_keeps_the_users_account() -> None:
    body = built(with_template(lambda s: s.update(serviceAccountName="bucket-reader")))
    assert body["spec"]["automountServiceAccountToken"] is False
    assert body["spec"]["serviceAccountName"] == "bucket-reader"
    assert body["spec"]["restartPolicy"] == "OnFailure"


def test_nodes_in_question_are_excluded_from_every_alternative_of_the_user() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchExpressions": []}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    body = built(
        with_template(lambda s: s.update(affinity={"nodeAffinity": required})),
        avoid=["n2", "n1", "n2"],
    )
    found = body["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    for term in found["nodeSelectorTerms"]:
        assert [f["values"] for f in term["matchFields"]] == [["n1"], ["n2"]]
    assert found["nodeSelectorTerms"][0]["matchExpressions"] == terms[0]["matchExpressions"]


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def test_a_pod_prefers_the_domains_of_its_mates_the_narrower_the_more() -> None:
    terms = built(mates=(3, 1))["spec"]["affinity"]["podAffinity"][PREFERRED]
    assert [(t["podAffinityTerm"]["topologyKey"], t["weight"]) for t in terms] == [
        ("kubernetes.io/hostname", 100),
        ("nvidia.com/gpu.clique", 80),
        ("topology.kubernetes.io/rack", 60),
        ("topology.kubernetes.io/zone", 40),
    ]
    mates = {
        "matchLabels": {"everstep.dev/job-uid": UID},
        "matchExpressions": [{"key": "everstep.dev/slot", "operator": "In", "values": ["3", "1"]}],
    }
    assert [t["podAffinityTerm"]["labelSelector"] for t in terms] == [mates] * 4
    assert "affinity" not in built()["spec"]


def test_a_spare_keeps_apart_from_all_but_its_mates() -> None:
    def distance(**kwargs: Any) -> Any:
        return built(spare=True, **kwargs)["spec"]["affinity"]["podAntiAffinity"][PREFERRED]

    def selector(term: Any) -> Any:
        return term["podAffinityTerm"]["labelSelector"]

    ours = {"matchLabels": {"everstep.dev/job-uid": UID}}
    assert [selector(t) for t in distance()] == [ours, ours]
    others = [{"key": "everstep.dev/slot", "operator": "NotIn", "values": ["3"]}]
    assert [selector(t) for t in distance(mates=(3,))] == [ours | {"matchExpressions": others}] * 2
    assert "podAffinity" in built(spare=True, mates=(3,))["spec"]["affinity"]


def test_the_users_own_affinity_is_kept_and_extended() -> None:
    own = {"podAffinityTerm": {"topologyKey": "mine"}, "weight": 1}
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "block"}]}
    affinity = {
        "podAffinity": {PREFERRED: [own], **hard},
        "podAntiAffinity": {PREFERRED: [own]},
        "nodeAffinity": {PREFERRED: [{"weight": 2, "preference": {}}]},
    }
    found = built(
        with_template(lambda s: s.update(affinity=affinity)), mates=(3,), spare=True, shun=["n1"]
    )["spec"]["affinity"]
    assert found["podAffinity"][PREFERRED][0] == own
    assert found["podAffinity"].items() >= hard.items()
    assert {kind: len(part[PREFERRED]) for kind, part in found.items()} == {
        "podAffinity": 5, "podAntiAffinity": 3, "nodeAffinity": 2,
    }  # fmt: skip


def test_the_template_itself_is_left_alone() -> None:
    near: Any = {"podAffinity": {PREFERRED: []}, "podAntiAffinity": None}
    template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "affinity": near}}
    spec = a_spec()
    before = copy.deepcopy(template)
    built(
        {**spec, "workers": {**spec["workers"], "template": template}},
        avoid=["n1"],
        mates=(3,),
        spare=True,
    )
    assert before == template


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(containers=[]), "containers is empty"),
        (lambda s: s.update(containers=[{"name": "a"}, {"name": "b"}]), "none is named `trainer`"),
        (lambda s: s["containers"][0].update(env=[{"name": "EVERSTEP_RUN"}]), "env EVERSTEP_RUN"),
        (lambda s: s.update(volumes=[{"name": "everstep-memory"}]), "volume everstep-memory"),
        (lambda s: s["containers"][0].update(ports=[{"containerPort": 7070}]), "everstep/7070"),
    ],
)
def test_a_clash_names_both_sides(change: Any, words: str) -> None:
    spec = with_template(change)
    model.parse_spec(spec)
    assert words in manifests.find_conflict(spec["workers"]["template"])


def test_a_variable_that_is_meant_for_users_is_no_clash() -> None:
    mine = {"name": "EVERSTEP_GROUP_FORMING", "value": "reinit"}
    spec = with_template(lambda s: s["containers"][0].update(env=[mine]))
    assert manifests.find_conflict(spec["workers"]["template"]) == ""
    assert mine in built(spec)["spec"]["containers"][0]["env"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1Gi", 2**30), ("1500M", 1_500_000_000), ("1e9", 10**9), ("128974848", 128974848)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, size: int) -> None:
    assert manifests.to_bytes(text) == size


@pytest.mark.parametrize(
    ("mounts", "warned"),
    [
        ([], True),
        (["/scratch"], False),
        (["/scratch/"], False),
        (["/scratch/everstep"], False),
        (["/scratch/every"], True),
        (["/data", "/scratch/everstep/deeper"], True),
    ],
)
def test_a_disk_path_on_no_volume_is_told_in_the_condition(mounts: list[str], warned: bool) -> None:
    """Else the copies fill the container's own layer, and end with it."""

    def mount(spec: Any) -> None:
        found = [{"name": f"v{n}", "mountPath": path} for n, path in enumerate(mounts)]
        spec["containers"][0]["volumeMounts"] = found

    spec = with_template(mount)
    spec["checkpoint"] = {**spec["checkpoint"], "diskPath": "/scratch//everstep/"}
    told = conditions.decide_checkpoint(an_observation(job=a_job(spec)), (), NOW)
    assert ("mounts no volume at checkpoint.diskPath" in told.message) is warned
    assert manifests.find_conflict(spec["workers"]["template"]) == "", "the job trains nevertheless"
