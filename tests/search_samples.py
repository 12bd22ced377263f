"""A search space with conditions, a machine made of one formula, and the loop of a driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.expression import Expression
from runner.launch import as_int
from runner.search.proposals import Proposal
from runner.search.storage import open_database
from runner.search.study import Search
from runner.settings import Baseline, Choices, IntRange, SearchSettings, StudySettings
from runner.trial import EngineKind, Outcome, Params, ParamValue, TrialResult
from tests.samples import make_settings

PIPELINE = Expression("pp_size > 1")
DEPTH, CAP = "pp_async_batch_depth", "pp_max_micro_batch_size"
PARAMETERS = (
    Choices("tp_size", (1, 2, 4, 8)),
    Choices("pp_size", (1, 2, 4, 8)),
    IntRange(DEPTH, 0, 8, when=PIPELINE),
    IntRange(CAP, 1, 64, log=True, when=PIPELINE),
    Choices("cuda_graph", (True, False)),
    Choices("attention_backend", ("triton", "flashinfer")),
)
BASELINES = (
    Baseline("tp8", {"tp_size": 8, "pp_size": 1}),
    Baseline("pp8-auto", {"tp_size": 1, "pp_size": 8, DEPTH: 0}),
)
DEFAULTS: Params = {
    "tp_size": 1,
    "pp_size": 1,
    DEPTH: 0,
    "cuda_graph": True,
    "attention_backend": "triton",
}


def search_settings(trials: int = 20, seed: int = 0, **changes: Any) -> StudySettings:  # noqa: ANN401
    """The demo's space and baselines; `sampler` and any field of StudySettings can be given."""
    sampler = changes.pop("sampler", "auto")
    fields: dict[str, Any] = {
        "parameters": PARAMETERS,
        "constraints": (Expression("tp_size * pp_size == 8"),),
        "baselines": BASELINES,
        "search": SearchSettings(sampler, trials, seed, None, None, None, None),
    }
    return make_settings(**{**fields, **changes})


def on_real_servers(settings: StudySettings) -> StudySettings:
    """The study with servers of which little is known before a launch."""
    return replace(settings, engine=replace(settings.engine, kind=EngineKind.SGLANG))


def open_search(settings: StudySettings, folder: Path) -> Search:
    """The study's search in a SQLite file of the folder."""
    file = folder / "optuna.db"
    if not file.exists():
        file.write_bytes(empty_database())
    return Search(settings, f"sqlite:///{file}")


@cache
def empty_database() -> bytes:
    """Optuna's tables without a study: making them takes half a second, copying them does not."""
    with TemporaryDirectory() as folder:
        database = open_database(f"sqlite:///{folder}/empty.db")
        database.remove_session()
        database.engine.dispose()
        return (Path(folder) / "empty.db").read_bytes()


def resolve(params: Params) -> dict[str, ParamValue]:
    """What servers say they run with: the parameters given, SGLang's defaults for the others."""
    full = {**DEFAULTS, **params}
    cap = max(1, 256 // as_int(full["pp_size"]))
    return {CAP: cap, **full}


def throughput(params: Params) -> float:
    """Tokens per second at 32 streams: best at pp 8, depth 0, cap 4, with CUDA graphs."""
    full = resolve(params)
    pp_size, depth, cap = (as_int(full[name]) for name in ("pp_size", DEPTH, CAP))
    slots = pp_size + depth
    fair = -(-32 // slots)
    fill = min(cap, fair) / max(cap, fair) if pp_size > 1 else 1.0
    base = 200.0 + 40.0 * pp_size * fill - 5.0 * depth
    graph = 1.3 if full["cuda_graph"] else 1.0
    return base * graph * (1.05 if full["attention_backend"] == "triton" else 1.0)


def result_of(proposal: Proposal, **changes: Any) -> TrialResult:  # noqa: ANN401
    """A complete measurement of a proposal on the formula, with fields replaced."""
    complete = TrialResult(
        number=proposal.number,
        name=proposal.name,
        params=proposal.params,
        resolved=resolve(proposal.params),
        outcome=Outcome.COMPLETE,
        reason=None,
        retry_of=proposal.retry_of,
        repeat_of=proposal.repeat_of,
        spec_hash=proposal.spec_hash,
        launch=proposal.number,
        stage=None,
        values=(throughput(proposal.params),),
        constraints=(),
    )
    return replace(complete, **changes)


def bad(proposal: Proposal, outcome: Outcome) -> TrialResult:
    """A proposal that gave no values."""
    return result_of(proposal, outcome=outcome, reason=f"was {outcome}", values=(), resolved={})


def finish(
    search: Search, measure: Callable[[Proposal], TrialResult] = result_of
) -> list[Proposal]:
    """Drive a search to its end, one trial at a time; what it asked for."""
    asked: list[Proposal] = []
    while (proposal := search.ask()) is not None:
        asked.append(proposal)
        search.tell(measure(proposal))
    return asked


def chosen(proposals: list[Proposal]) -> list[Proposal]:
    """Those that the sampler proposed."""
    return [p for p in proposals if p.name is None and p.retry_of is None and p.repeat_of is None]
