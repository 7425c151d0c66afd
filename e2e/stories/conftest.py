"""All stories share one cluster, one installation and one long-running job.

The run ends with a table of figures.
"""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from everstep_demo.timeline import Timeline
from everstep_demo.trial import Trial
from everstep_lab.seam import LabError
from everstep_stories import order
from everstep_stories.artefacts import print_artefacts
from everstep_stories.clusters import KINDS, NODES, Cluster, NotHereError, open_cluster
from everstep_stories.figures import Outcome, Recorder, build_phases, build_table
from everstep_stories.jobs import Workplace, build_job
from everstep_stories.scene import Scene
from everstep_stories.system import System

SURVIVOR = "survivor"
BEGAN, OUTCOMES, TIMELINE = (pytest.StashKey[object]() for _ in range(3))
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stories")
    group.addoption(
        "--stories", choices=("core", "all"), default="all", help="which stories to run"
    )
    group.addoption(
        "--cluster", choices=KINDS, default="kind",
        help="kind: created and deleted here; running: the kind lab that `everstep-lab up --kind "
        "--no-operator` started; local: the lab without containers or Helm; given: --kubeconfig",
    )  # fmt: skip
    group.addoption("--kubeconfig", default="", help="use this cluster (implies --cluster=given)")
    group.addoption("--namespace", default="training", help="namespace of the jobs")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = []
    config.stash[BEGAN] = time.monotonic()


def story_of(item: pytest.Item) -> str:
    return Path(str(item.path)).stem.removeprefix("test_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [i for i in items if Path(__file__).parent in i.path.parents]
    if not mine:
        return
    if config.getoption("--stories") == "core":
        left_out = [i for i in mine if story_of(i) not in order.CORE]
        config.hook.pytest_deselected(items=left_out)
        mine = [i for i in mine if i not in left_out]
    items[:] = sorted(mine, key=lambda i: order.place_of(story_of(i)))


@pytest.fixture(scope="session")
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, timeline: Timeline) -> Iterator[Cluster]:
    option = request.config.getoption
    kind = "given" if option("--kubeconfig") else option("--cluster")
    timeline.heading(f"A cluster ({kind})")
    problem = "no cluster for the stories"
    try:
        nodes = NODES["all" if kind == "local" else option("--stories")]
        with open_cluster(
            kind, option("--kubeconfig"), nodes, lambda text: timeline.say("cluster", text)
        ) as cluster:
            timeline.say("cluster", "up")
            problem = "the stories have run, but their cluster could not be deleted"
            yield cluster
    except LabError as error:
        pytest.exit(f"{problem}: {error}", returncode=1)


@pytest.fixture(scope="session")
def bare_system(cluster: Cluster) -> System:
    """Everstep, which may not be installed yet."""
    return System(cluster)


@pytest.fixture(scope="session")
def system(bare_system: System, timeline: Timeline) -> System:
    """Everstep, installed first if needed."""
    if bare_system.by_helm and (took := bare_system.install()):
        timeline.say("helm", f"installed and ready after {took:.1f} s")
    return bare_system


@pytest.fixture(scope="session")
def workplace(request: pytest.FixtureRequest, cluster: Cluster, system: System) -> Workplace:
    place = Workplace(cluster, request.config.getoption("--namespace"))
    place.make()
    return place


@pytest.fixture
def recorder(request: pytest.FixtureRequest, timeline: Timeline) -> Iterator[Recorder]:
    story = story_of(request.node)
    timeline.heading(story.replace("_", " "))
    outcomes: list[Outcome] = request.config.stash[OUTCOMES]
    if not outcomes or outcomes[-1].story != story:
        outcomes.append(Outcome(story=story))
    began = time.monotonic()
    yield Recorder(outcomes[-1], timeline)
    outcomes[-1].seconds += time.monotonic() - began


@pytest.fixture
async def scene(
    request: pytest.FixtureRequest, cluster: Cluster, system: System, workplace: Workplace,
    recorder: Recorder,
) -> AsyncIterator[Scene]:  # fmt: skip
    async with cluster.api() as api:
        scene = Scene(cluster, system, api, workplace.namespace, recorder)
        yield scene
        await scene.tidy(failed=request.node.stash.get(FAILED, False))


@pytest.fixture
async def survivor(scene: Scene) -> Trial:
    """A very long job that trains through most stories. It is taking steps when a story begins."""
    trial = await scene.start(build_job(SURVIVOR), lasting=True)
    await trial.until_stepping(limit=180)
    return trial


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a story that this cluster cannot run; print the diagnostics of one that failed."""
    if call.excinfo is not None and call.excinfo.errisinstance(NotHereError):
        call.excinfo = pytest.ExceptionInfo.from_exc_info(_as_skip(call.excinfo.value))
    result = yield
    report = result.get_result()
    if report.skipped:
        _mark(item, "skipped")
    if not report.failed or (arguments := getattr(item, "funcargs", None)) is None:
        return
    _mark(item, "FAILED")
    item.stash[FAILED] = True
    cluster, system = arguments.get("cluster"), arguments.get("bare_system")
    scene = arguments.get("scene")
    if scene is not None:
        cluster, system = scene.cluster, scene.system
    if cluster is not None and system is not None:
        print(f"\n{report.longreprtext}\n\n=== diagnostics of {item.name}", flush=True)
        print_artefacts(cluster, system, item.config.getoption("--namespace"))


def _mark(item: pytest.Item, word: str) -> None:
    for outcome in item.config.stash[OUTCOMES]:
        if outcome.story == story_of(item) and outcome.ended != "FAILED":
            outcome.ended = word


def _as_skip(error: BaseException) -> tuple[type, BaseException, object]:
    skip = pytest.skip.Exception(str(error))
    return type(skip), skip, error.__traceback__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes = terminalreporter.config.stash[OUTCOMES]
    if not outcomes:
        return
    terminalreporter.section("the stories")
    for line in filter(None, map(build_phases, outcomes)):
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    terminalreporter.write_line(build_table(outcomes))
    took = time.monotonic() - terminalreporter.config.stash[BEGAN]
    terminalreporter.write_line(f"\ntotal with the cluster: {took:.0f} s")
