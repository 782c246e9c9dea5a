"""Shared fixtures: the servers, the length of the run and its seed; also a report of the time spent.

Each server starts when the first test uses it, once for each process of the run, with separate ports and data: a test
may stop and restart it without affecting tests of other processes. A test that kills, pauses or reconfigures a broker
starts a separate one (`support.rabbitmq.RabbitCluster`).
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest

from support import precedence, preloaded, spark_classes
from support.openid import find_modules
from support.processes import ServerMissingError
from support.prometheus import program
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import NEWEST, RabbitRelease, find_release, series_to_test
from support.redis import RedisServer
from support.sharing import OTHER_SERIES, folder_of, note, scheduler, start_order
from support.spark import require_java, started_spark
from support.turns import Quiet, Turns
from tla.checker import find_jar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Maximum seconds of one process for each folder if three processes share the run (`make test`, which takes a third of
# their sum) on two cores, including the servers' start; --full runs have no budget.
BUDGET_SECONDS = {
    "unit": 140,
    "contract": 1850,
    "engine": 250,
    "cluster": 1850,
    "clients": 400,
    "acceptance": 180,
    "console": 110,
    "spark": 550,
}
QUICK_FOLDERS = ("unit", "contract", "engine")
QUICK_WITHOUT = frozenset(
    {"rabbitmq", "rabbitmq_release", "spark", "java", "tlc", "openid_modules", "prometheus_programs"}
)
"""Fixtures whose tests --quick skips."""
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SLOWEST = 25
"""Number of slowest files that are listed with their times."""
DEFAULT_SEED = 20_240_613
SEED_MAX = 2**32

missing_servers = pytest.StashKey[set[str]]()
run_seed = pytest.StashKey[int]()
turns = pytest.StashKey[Turns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("popgate")
    group.addoption("--full", action="store_true", help="full counts and a random seed instead of a short fixed run")
    group.addoption("--quick", action="store_true", help="only what is fast and needs no server but Redis")
    group.addoption("--seed", type=int, help="the seed of everything random, to replay a run")
    group.addoption("--note-seconds", action="store_true", help="write down the tests' times, from which to start them")
    group.addoption("--planted", action="store_true", help="a slip is planted: don't shrink or keep failing examples")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis looks for its seed
def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell's background job: processes started here would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes start from the same code: with this variable set, each of them would compile all of it
    # again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{spark_classes.QUICK_COMPILER} {spark_classes.java_options()}")
    full = config.getoption("full")
    seed = config.getoption("seed")
    if seed is None:
        seed = secrets.randbelow(SEED_MAX) if full else DEFAULT_SEED
    config.stash[run_seed] = seed
    config.stash[missing_servers] = set()
    config.option.seed = config.option.hypothesis_seed = seed  # of the processes that share a run (-n), too
    if (processes := getattr(config, "workerinput", {}).get("workercount", 1)) > 1:
        config.stash[turns] = Turns(Path(config.option.basetemp).parent / "turns", processes)
        preloaded.turn_on()
    # Machines differ in speed: the budgets below limit the time, not a deadline for each example.
    hypothesis.settings.register_profile("short", deadline=None, max_examples=100, stateful_step_count=30)
    hypothesis.settings.register_profile("full", deadline=None, max_examples=2000, stateful_step_count=100)
    hypothesis.settings.load_profile("full" if full else "short")
    if config.getoption("planted"):
        phases = [one for one in hypothesis.Phase if one not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
        hypothesis.settings.register_profile("planted", hypothesis.settings(), phases=phases, database=None)
        hypothesis.settings.load_profile("planted")


def pytest_report_header(config: pytest.Config) -> list[str]:
    length = "--full " if config.getoption("full") else ""
    releases = series_to_test()
    told = ", ".join(
        str(release) if str(release).startswith(f"{series}.") else f"{release} in place of {series}"
        for series, release in releases.items()
    )
    return [f"popgate: replay this run with {length}--seed {config.stash[run_seed]}", f"RabbitMQ: {told or 'missing'}"]


# ---------------------------------------------------------------- releases of RabbitMQ


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its series of RabbitMQ, even a test without a broker: a session's servers are kept over them."""
    series = [*series_to_test()] or [NEWEST]
    marker = metafunc.definition.get_closest_marker("rabbitmq_versions")
    wanted = () if marker is None else marker.args or series[1:]
    series = [*series[:1], *(one for one in series[1:] if one in wanted)]
    metafunc.fixturenames.append("rabbitmq_series")
    ids = [pytest.HIDDEN_PARAM, *(f"{OTHER_SERIES}{one}" for one in series[1:])]
    metafunc.parametrize("rabbitmq_series", series, ids=ids, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a test on popgate's own broker only once; with --quick, skip tests that are slow or need servers."""
    left_out = {item for item in items if OTHER_SERIES in item.name and _parameters(item) & {"embedded", "simulated"}}
    if config.getoption("quick"):
        left_out |= {item for item in items if not _is_quick(item)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    if turns in config.stash:
        items.sort(key=lambda item: start_order(item.nodeid))


def _parameters(item: pytest.Item) -> set[str]:
    """Return the texts among the parameters of a test; those that name a broker choose it."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return set()
    return {value for value in item.callspec.params.values() if isinstance(value, str)}


def _is_quick(item: pytest.Item) -> bool:
    fixtures: set[str] = set(getattr(item, "fixturenames", ()))
    needs_server = fixtures & QUICK_WITHOUT or _parameters(item) & {"rabbitmq", "front"}
    is_slow = item.get_closest_marker("slow") is not None
    return folder_of(item.nodeid) in QUICK_FOLDERS and not needs_server and not is_slow


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group tests that belong together on one process, if several processes share the run."""
    return scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let each test wait for its turn if several processes share the run.

    Successive quiet tests keep their places: otherwise each would wait until another's long test ends.
    """
    if turns not in item.config.stash:
        return (yield)
    turn = item.config.stash[turns]
    turn.take(quiet=_is_quiet(item))
    try:
        return (yield)
    finally:
        if nextitem is None or not (_is_quiet(item) and _is_quiet(nextitem)):
            turn.give_back()


def _is_quiet(item: pytest.Item) -> bool:
    return item.get_closest_marker("quiet") is not None


@pytest.fixture
def quiet(pytestconfig: pytest.Config) -> Quiet:
    """Creates a context for the part of a test that bounds how long something takes: its servers, by process ids, go
    before all others. Where that is not allowed, it is like the marker `quiet`.
    """

    @asynccontextmanager
    async def context(pids: Sequence[int]) -> AsyncGenerator[None]:
        turn = pytestconfig.stash.get(turns, None)
        if precedence.is_allowed():
            with precedence.precedence(pids):
                yield
            return
        if turn is None:
            yield
            return
        await asyncio.to_thread(turn.take, quiet=True)
        try:
            yield
        finally:
            await asyncio.to_thread(turn.take, quiet=False)

    return context


@pytest.fixture(scope="session")
def rabbitmq_series(request: pytest.FixtureRequest) -> str:
    """The series of RabbitMQ that the test runs on, for example 4.0. The hooks above choose it."""
    return str(request.param)


@pytest.fixture(scope="session")
def rabbitmq_release(rabbitmq_series: str, pytestconfig: pytest.Config) -> RabbitRelease:
    """The release, for tests that start separate nodes."""
    try:
        return find_release(rabbitmq_series)
    except ServerMissingError as error:
        do_without(error, pytestconfig)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Restore the level of all logs, which a command in the test's own process changes."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="session")
def full_run(pytestconfig: pytest.Config) -> bool:
    """Whether to run the full counts (--full) instead of short ones."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The seed of a test's own `random.Random`."""
    return pytestconfig.stash[run_seed]


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease) -> Iterator[RabbitNode]:
    """The run's one RabbitMQ node of a release. Leave it running as it was found."""
    with RabbitCluster(tmp_path_factory.mktemp("rabbitmq"), release=rabbitmq_release) as cluster:
        yield cluster.nodes[0]


@pytest.fixture(scope="session")
def shared_nodes(tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease) -> Iterator[RabbitCluster]:
    """The run's one cluster of three nodes of a release; `three_nodes` has all of them running."""
    settings = RabbitSettings(net_tick_seconds=8, net_setup_seconds=1)
    with RabbitCluster(
        tmp_path_factory.mktemp("nodes"), release=rabbitmq_release, size=3, settings=settings
    ) as cluster:
        yield cluster


@pytest.fixture
def three_nodes(shared_nodes: RabbitCluster) -> RabbitCluster:
    """Three running nodes that a test may kill, pause and part. The others consider a hanging node down after 6 to
    10 s. List the files of tests that use it in `support.sharing`.
    """
    shared_nodes.make_whole()
    return shared_nodes


@pytest.fixture(scope="session")
def behind_the_tests() -> Iterator[Executor]:
    """Runs background work that no test waits for. It is finished before the servers end."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def amqp_url(rabbitmq: RabbitNode, behind_the_tests: Executor) -> Iterator[str]:
    """The URL of a virtual host for this test alone; it is deleted with all its queues when the test ends."""
    vhost = f"test-{secrets.token_hex(4)}"
    rabbitmq.add_vhost(vhost)
    yield rabbitmq.amqp_url(vhost)
    rabbitmq.resume()  # a test that failed half way must not break later tests
    if not rabbitmq.is_running():  # asking a running one whether it is ready takes as long as many a test
        rabbitmq.start()
    behind_the_tests.submit(rabbitmq.delete_vhost, vhost)  # it is left over if the next test stops the node


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[RedisServer]:
    """The run's one Redis. A test that uses it empties the database first."""
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except ServerMissingError as error:
        do_without(error, pytestconfig)
    with server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, java: None) -> "Iterator[SparkSession]":
    """The run's one Spark session, `local[2]`: it takes five seconds to start, in each process of the run."""
    with started_spark(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture(scope="session")
def java(pytestconfig: pytest.Config) -> None:
    """Java, and the archive of Spark's classes, for tests that start Spark."""
    try:
        require_java()
        spark_classes.make_archive()
    except ServerMissingError as error:
        do_without(error, pytestconfig)


@pytest.fixture(scope="session")
def chromium(pytestconfig: pytest.Config) -> str:
    """The path of a real browser."""
    found = next((program for name in BROWSERS if (program := shutil.which(name))), None)
    if found is None:
        do_without(ServerMissingError("Chromium is missing (apt-get install chromium-headless-shell)"), pytestconfig)
    return found


@pytest.fixture(scope="session")
def openid_modules(pytestconfig: pytest.Config) -> Path:
    """The packages of the OpenID provider (`support.openid.OpenIdProvider`)."""
    try:
        return find_modules()
    except ServerMissingError as error:
        do_without(error, pytestconfig)


@pytest.fixture(scope="session")
def tlc(pytestconfig: pytest.Config) -> Path:
    """TLC's jar, and Java to run it. Unlike a server it may be missing in CI, too: popgate does not run on it."""
    try:
        return find_jar()
    except ServerMissingError as error:
        pytestconfig.stash[missing_servers].add(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def prometheus_programs(pytestconfig: pytest.Config) -> None:
    """Require Prometheus and promtool, which .ci/unpack-prometheus fetches."""
    try:
        program("prometheus")
        program("promtool")
    except ServerMissingError as error:
        do_without(error, pytestconfig)


def do_without(error: ServerMissingError, config: pytest.Config) -> NoReturn:
    """Fail the test in CI because of a missing server; elsewhere skip it, and report it in the run's last lines."""
    if os.environ.get("CI"):
        pytest.fail(str(error), pytrace=False)
    config.stash[missing_servers].add(str(error))
    pytest.skip(str(error))


# ---------------------------------------------------------------- the last lines of the run


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report what this process missed, if several share the run (-n)."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["missing_servers"] = [*session.config.stash[missing_servers]]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what a process missed; a crashed one reports nothing."""
    output: dict[str, list[str]] = getattr(node, "workeroutput", {})
    node.config.stash[missing_servers].update(output.get("missing_servers", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    used: defaultdict[str, float] = defaultdict(float)
    by_file: defaultdict[str, float] = defaultdict(float)
    by_test: defaultdict[str, float] = defaultdict(float)
    told: list[object] = []
    """What tests report about themselves (``record_property``)."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                used[folder_of(report.nodeid)] += report.duration
                by_file[report.nodeid.partition("::")[0]] += report.duration
                by_test[report.nodeid] += report.duration
                told += [text for name, text in report.user_properties if name == "told" and report.when == "call"]
    terminalreporter.section("popgate: time by folder")
    for folder, seconds in sorted(used.items()):
        budget = None if config.getoption("full") else BUDGET_SECONDS.get(folder)
        of_budget = "" if budget is None else f" of {budget} s"
        terminalreporter.write_line(f"{folder:12} {seconds:7.1f} s{of_budget}")
        if budget is not None and seconds > budget:
            terminalreporter.write_line(f"WARNING: tests/{folder} took longer than its budget", yellow=True)
    if config.getoption("note_seconds"):
        note(by_test)
    slowest = sorted(by_file.items(), key=lambda one: -one[1])[:SLOWEST]
    named = ", ".join(f"{name.removeprefix('tests/')} {seconds:.0f}" for name, seconds in slowest)
    if named:
        terminalreporter.write_line(f"most of it, in seconds: {named}")
    for text in told:
        terminalreporter.write_line(f"{text}")
    missing = config.stash[missing_servers]
    for what in sorted(missing):
        terminalreporter.write_line(f"WARNING: {what}: its tests were SKIPPED", yellow=True)
