"""Two saved views of a study's experiment, so that MLflow opens on what matters.

MLflow keeps a saved view as an experiment tag; `?viewStateShareKey=KEY` opens it. Without one its
run list shows only the study's own run, folded, and none of the columns that rank trials.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence

from runner.record.run_content import KIND_TAG, TRIAL_KIND
from runner.settings import Direction, Objective

VIEW_TAG = "mlflow.sharedViewState."
VIEW = "trials"
COLUMNS = (
    "tags.`outcome`",
    "metrics.`objective`",
    "metrics.`output_throughput`",
    "metrics.`ttft_s.p99`",
    "metrics.`tpot_s.p50`",
    "metrics.`power_w`",
    "metrics.`tokens_per_joule`",
)
LENGTHS_COLUMN = "tags.`lengths`"
OVER_CONCURRENCY = (
    "output_throughput",
    "power_w",
    "ttft_s.p99",
    "tpot_s.p50",
    "tokens_per_joule",
    "achieved_concurrency",
)
NAME_COLUMN = "attributes.`Run Name`"
LAYOUT = "workflowType=machine_learning"  # else MLflow opens with its pages for agents
RUNGS, SEARCH = "rungs", "search"


def experiment_tags(
    objectives: Sequence[Objective], params: Sequence[str], *, has_two_laws: bool = False
) -> dict[str, str]:
    """Tags that make an experiment open as a list of trials, best first, with their charts.

    `has_two_laws`: finalists have other lengths than the search, so a column says which.
    """
    columns = (LENGTHS_COLUMN, *COLUMNS) if has_two_laws else COLUMNS
    state = _state(objectives[0], params, columns)
    return {
        "mlflow.experimentKind": "custom_model_development",
        f"{VIEW_TAG}{VIEW}": _envelope("Trials, best first", state),
    }


def page(address: str, experiment: str, *, charts: bool = False) -> str:
    """Where the saved view of an experiment is."""
    mode = "CHART" if charts else "TABLE"
    query = f"viewStateShareKey={VIEW}&compareRunsMode={mode}&{LAYOUT}"
    return f"{address}/#/experiments/{experiment}/runs?{query}"


def run_page(address: str, experiment: str, run_id: str, tab: str) -> str:
    """Where one run is: `overview`, `model-metrics` (rungs), `system-metrics` (GPUs over time)."""
    return f"{address}/#/experiments/{experiment}/runs/{run_id}/{tab}?{LAYOUT}"


def _state(
    objective: Objective, params: Sequence[str], columns: Sequence[str]
) -> dict[str, object]:
    """All fields of MLflow's page state: what is left out would be undefined there."""
    return {
        "searchFilter": f"tags.{KIND_TAG} = '{TRIAL_KIND}'",
        "orderByKey": "metrics.`objective`",
        "orderByAsc": objective.direction is Direction.MINIMIZE,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "columnOrder": [NAME_COLUMN, *columns],
        "columnWidths": {NAME_COLUMN: 280},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_10_RUNS",
        "compareRunCharts": [*map(_line, OVER_CONCURRENCY), _bar("objective"), _parallel(params)],
        "compareRunSections": [
            _section(RUNGS, "Over concurrency (the step)"),
            _section(SEARCH, "Over the search space"),
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
    }


def _card(kind: str, section: str, name: str) -> dict[str, object]:
    return {
        "type": kind,
        "uuid": f"{section}-{name}",
        "runsCountToCompare": 20,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
    }


def _line(metric: str) -> dict[str, object]:
    return _card("LINE", RUNGS, metric) | {
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "range": {},
        "displayPoints": True,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
    }


def _bar(metric: str) -> dict[str, object]:
    return _card("BAR", SEARCH, metric) | {"metricKey": metric}


def _parallel(params: Sequence[str]) -> dict[str, object]:
    return _card("PARALLEL", SEARCH, "parameters") | {
        "selectedParams": list(params),
        "selectedMetrics": ["objective"],
        "showAllRuns": True,
    }


def _section(identity: str, name: str) -> dict[str, object]:
    return {
        "uuid": identity,
        "name": name,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _envelope(name: str, state: dict[str, object]) -> str:
    """The tag's value: name and date readable, the page state compressed as MLflow does it."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    return json.dumps({"name": name, "createdAt": 0, "state": f"deflate;{packed}"})
