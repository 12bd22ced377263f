"""What is known not to run without a launch: the search never asks for it. Pure.

An engine that stands on a profile (simulated, emulated) can run what the profile can; of a real
server only the rules of SGLang itself are known, the rest is learned by launching. A baseline is
tried whatever is known, since it was asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from runner.errors import ConfigError
from runner.forecast.examine import examine
from runner.forecast.findings import Finding, group, refusal_example
from runner.forecast.setting import not_modelled, plan_setting, refused_rules, study_profile
from runner.machine.shape import Refusal, RefusalKind
from runner.settings import StudySettings
from runner.trial import EngineKind, Params

KnownRefusal: TypeAlias = Callable[[Params], Refusal | None]
"""Why a setting is known not to run; None: it may run."""


def known_refusal(settings: StudySettings) -> KnownRefusal:
    """What is known of each setting of a study; raises ConfigError where it names no profile."""
    engine = settings.engine
    if engine.kind is EngineKind.SGLANG:
        return lambda params: refused_rules(engine.env, {**engine.args, **params})
    profile = study_profile(settings)

    def may_need_less(refusal: Refusal, params: Params) -> bool:
        """An emulated server knows more flags of CUDA graphs than its profile's rules do."""
        if engine.kind is EngineKind.SIMULATED or refusal.kind is not RefusalKind.MEMORY:
            return False
        return any("cuda_graph" in name for name in not_modelled({**engine.args, **params}))

    def of_profile(params: Params) -> Refusal | None:
        found = plan_setting(settings, profile, params)
        return found if isinstance(found, Refusal) and not may_need_less(found, params) else None

    return of_profile


def check_runnable(settings: StudySettings) -> None:
    """Raise ConfigError when every setting looked at and every baseline is known not to run."""
    known = known_refusal(settings)
    reasons: list[tuple[str, str]] = []
    for params in _asked(settings):
        refusal = known(params)
        if refusal is None:
            return
        reasons.append((refusal.kind.value, refusal_example(params, refusal.text)))
    raise ConfigError(
        f"no setting of study {settings.name} can run:\n{finding_lines(group(reasons))}\n"
        "Expected at least one that can; change parameters, constraints, baselines or hardware "
        "(`runner plan` shows what can run)"
        if reasons
        else f"no setting of study {settings.name} keeps its constraints and fits on "
        f"{settings.hardware.gpus} GPUs (hardware.gpus); change parameters or constraints"
    )


def _asked(settings: StudySettings) -> Iterator[Params]:
    """Baselines, then settings: a space is looked at only where no baseline may run."""
    yield from (baseline.params for baseline in settings.baselines)
    yield from examine(settings).settings


def finding_lines(findings: tuple[Finding, ...]) -> str:
    """One line a finding: how often, and the example."""
    return "\n".join(f"  {each.count} x {each.reason}: {each.example}" for each in findings)
