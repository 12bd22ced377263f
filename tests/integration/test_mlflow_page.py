"""MLflow's pages as a person sees them, in a real Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from runner.errors import ConfigError, StudyError
from runner.record.run_views import page, run_page
from runner.record.store import StudyStore
from runner.record.tracking import Tracker
from runner.record.ui import held_port, running_ui, serve, study_page, tracking_of
from runner.settings import Choices, IntRange
from tests.record_samples import write_study
from tests.samples import make_settings

PATIENCE_S = 120
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1900,1250"
)
CLOSE_ASSISTANT = "[data-component-id='mlflow.assistant.chat_panel.close']"
SETTINGS = make_settings(
    parameters=(
        Choices("tp_size", (1, 8)),
        Choices("pp_size", (1, 8)),
        IntRange("pp_async_batch_depth", 0, 8),
        IntRange("pp_max_micro_batch_size", 1, 64, log=True),
        Choices("attention_backend", ("triton", "flashinfer")),
    )
)
# The curves that Plotly has drawn, by the title of their card: a list of [x, y] for each line.
CURVES = """
const cards = [...document.querySelectorAll('[data-testid="experiment-view-compare-runs-card"]')];
const drawn = cards.filter(card => card.querySelector('.scatterlayer .trace path'));
return drawn.map(card => [
    card.innerText.split('\\n')[0],
    card.querySelector('.js-plotly-plot').data.map(line => [[...line.x], [...line.y]]),
]);
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A server that shows the demo study."""

    address: str
    home: Path
    experiment: str
    run_id: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    home = tmp_path_factory.mktemp("home")
    store = StudyStore(home, "demo")
    write_study(store, SETTINGS, samples_per_gpu=240)
    tracker = Tracker(store.mlflow_uri, store, SETTINGS)
    best = store.read_result(5)
    assert best is not None
    run_id = tracker.log_trial(best)
    tracker.finish("finished")
    with running_ui(*tracking_of(home, None)) as (address, _):
        yield Shown(address, home, tracker.experiment_id, run_id)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    opened = webdriver.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: SCREENSHOTS if set, so that a person can look at them."""
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def text_of(browser: WebDriver) -> str:
    return browser.find_element(By.TAG_NAME, "body").text


def wait_for_text(browser: WebDriver, *words: str) -> str:
    WebDriverWait(browser, PATIENCE_S).until(
        lambda opened: all(word in text_of(opened) for word in words), f"page lacks one of {words}"
    )
    for button in browser.find_elements(By.CSS_SELECTOR, CLOSE_ASSISTANT):
        button.click()
    return text_of(browser)


def wait_for_curves(browser: WebDriver, title: str, lines: int) -> list[tuple[Any, ...]]:
    """The (x, y) of each line of the chart, once at least `lines` of them are drawn."""

    def drawn(opened: WebDriver) -> list[Any]:
        curves: dict[str, list[Any]] = dict(opened.execute_script(CURVES))
        found = curves.get(title, [])
        return found if len(found) >= lines else []

    found = WebDriverWait(browser, PATIENCE_S).until(drawn, f"{title} is not drawn")
    return [tuple(zip(x, y, strict=True)) for x, y in found]


@pytest.mark.browser
def test_the_run_list_shows_the_trials_best_first(
    browser: WebDriver, shown: Shown, shots: Path
) -> None:
    browser.get(study_page(shown.address, "demo"))
    text = wait_for_text(browser, "10 matching runs", "#5 pp8 d0 cap4 graph triton", "infeasible")
    browser.save_screenshot(shots / "runs.png")
    order = [line for line in text.splitlines() if re.match(r"#\d+ ", line)]
    assert order[0] == "#5 pp8 d0 cap4 graph triton"
    assert set(order[-2:]) == {"#8 pp8 d0 cap8 graph flashinfer", "#9 pp8 d1 cap8 graph triton"}
    assert "#0 tp8" in order
    assert "#1 pp8-auto pp8" in order
    for column in ("outcome", "objective", "ttft_s.p99", "tpot_s.p50", "power_w"):
        assert column in text
    for outcome in ("complete", "pruned", "failed", "infeasible"):
        assert outcome in text


@pytest.mark.browser
def test_the_charts_show_throughput_over_concurrency(
    browser: WebDriver, shown: Shown, shots: Path
) -> None:
    browser.get(page(shown.address, shown.experiment, charts=True))
    wait_for_text(browser, "Over concurrency (the step)", "output_throughput", "power_w")
    lines = wait_for_curves(browser, "output_throughput", 8)
    wait_for_curves(browser, "tokens_per_joule", 8)
    browser.save_screenshot(shots / "charts.png")
    assert ((1, 53), (8, 238.5), (32, 530)) in lines
    assert ((1, 21), (8, 94.5), (32, 210)) in lines


@pytest.mark.browser
def test_a_trials_page_shows_its_command_and_its_rungs(
    browser: WebDriver, shown: Shown, shots: Path
) -> None:
    browser.get(run_page(shown.address, shown.experiment, shown.run_id, "overview"))
    wait_for_text(browser, "#5 pp8 d0 cap4 graph triton", "python -m sglang.launch_server")
    browser.save_screenshot(shots / "trial.png")
    browser.get(run_page(shown.address, shown.experiment, shown.run_id, "model-metrics"))
    wait_for_text(browser, "output_throughput", "Step")
    lines = wait_for_curves(browser, "output_throughput", 1)
    browser.save_screenshot(shots / "rungs.png")
    assert ((1, 53), (8, 238.5), (32, 530)) in lines


@pytest.mark.browser
def test_a_trials_page_shows_watts_over_time(browser: WebDriver, shown: Shown, shots: Path) -> None:
    browser.get(run_page(shown.address, shown.experiment, shown.run_id, "system-metrics"))
    wait_for_text(browser, "gpu_0_power_usage_watts", "gpu_0_utilization", "Time")
    lines = wait_for_curves(browser, "gpu_0_power_usage_watts", 1)
    browser.save_screenshot(shots / "power.png")
    longest = max(lines, key=len)
    assert 50 <= len(longest) <= 1000
    watts = [power_w for _, power_w in longest]
    assert 90 < min(watts) < max(watts) < 310


@pytest.mark.slow
def test_the_server_answers_this_machine_only(shown: Shown) -> None:
    assert shown.address.startswith("http://127.0.0.1:")
    asked = urllib.request.Request(shown.address, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        urllib.request.urlopen(asked)
    caught.value.close()


def test_a_taken_port_is_named_and_by_default_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = pytest.raises(
            ConfigError, match=f"port {port} is taken; choose another .* --port"
        )
        with refused, held_port(port):
            pytest.fail("it was given")
    with held_port(port) as held:
        assert held == port


def test_a_port_is_held_before_its_server_binds_it() -> None:
    with held_port(None) as first, held_port(None) as second:
        assert first != second


def test_a_home_without_a_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no MLflow store at .*start a study with runner tune"):
        serve(tmp_path, None, None)
    with pytest.raises(ConfigError, match="no study demo"):
        serve(tmp_path, "demo", None)


def test_a_study_on_a_server_names_that_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"tracking": {"uri": "http://mlflow.example:5000"}}
    StudyStore(tmp_path, "demo").create(settings, {})
    assert serve(tmp_path, "demo", None) == 0
    assert "http://mlflow.example:5000" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_why(tmp_path: Path) -> None:
    broken = tmp_path / "mlflow.db"
    broken.write_text("no database" * 100)
    with (
        pytest.raises(StudyError, match=r"(?s)ended while starting:.*file is not a database"),
        running_ui(f"sqlite:///{broken}", tmp_path),
    ):
        pytest.fail("it runs")


SERVE = """
import sys
from pathlib import Path
from typing import Any
from runner.record.ui import serve
sys.exit(serve(Path(sys.argv[1]), "demo", None))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_the_server_and_its_workers(shown: Shown, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVE, str(shown.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
    assert "viewStateShareKey=trials" in lines[0]
    assert "compareRunsMode=CHART" in lines[1]
    assert lines[2] == "Ctrl-C ends it.\n"
    assert len(started) >= 2
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
