"""When the save interval is edited while the job runs, all ranks of an epoch use the same one."""

from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.pod.worker_start import build_start
from everstep_contract import env
from everstep_operator.jobs.plan import plan
from job_builders import NOW, a_job, a_spec, a_status, an_observation

MEMBER = EpochMember(
    slot=0, attempt=1, incarnation=1, node_rank=0, first=0, lives=(1,), address="a"
)
SETTINGS = env.AgentEnv(
    job="team/lm", job_uid="u", slot=0, attempt=1, token="t", pod_ip="", uri="file:///x", run="r",
    memory="/m", save_every_steps=25,
)  # fmt: skip


def told(every: int | None) -> int:
    level = EpochLevel(
        number=2, token="t", stage=Stage.STARTING, members=(MEMBER,), save_every_steps=every
    )
    return build_start(SETTINGS, 0, level, MEMBER, None).save_every_steps


def test_the_job_is_told_the_interval_that_the_spec_has_now() -> None:
    spec = a_spec(checkpoint={"uri": "s3://bucket/folder", "everySteps": 40})
    wanted = plan(an_observation(job=a_job(spec, status=a_status())), NOW).wanted
    assert wanted is not None
    assert (wanted.save_every_steps, wanted.save_every_seconds) == (40, 0)
    spec = a_spec(checkpoint={"uri": "s3://bucket/folder", "everySeconds": 60})
    wanted = plan(an_observation(job=a_job(spec, status=a_status())), NOW).wanted
    assert wanted is not None
    assert (wanted.save_every_steps, wanted.save_every_seconds) == (0, 60)


def test_pods_made_before_and_after_an_edit_save_at_the_same_steps() -> None:
    assert told(40) == 40
    assert told(0) == 0
    assert told(None) == 25, "an older coordinator does not report it"
