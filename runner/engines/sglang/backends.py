"""Attention backends that SGLang has and a GPU cannot run: they are not worth a launch. Pure.

SGLang takes any backend's name and dies of it minutes later. Named here is only what holds for
every version; the rest is learned by launching.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.expression import Expression
from runner.settings import Choices, StudySettings
from runner.trial import EngineKind

PARAMETERS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
NEEDED = {
    "fa3": (range(8, 10), "SM80 to SM90"),
    "trtllm_mha": (range(10, 100), "SM100 or newer"),
    "trtllm_mla": (range(10, 100), "SM100 or newer"),
    **{
        name: (range(0), "no NVIDIA GPU")
        for name in ("intel_amx", "intel_xpu", "ascend", "aiter", "wave")
    },
}
"""Backend to the major compute capabilities that it runs on, and how a person says it."""


def impossible(
    settings: StudySettings, capabilities: Sequence[tuple[int, int] | None]
) -> tuple[Expression, ...]:
    """What must hold of a setting on these GPUs (their compute capabilities, None: not known)."""
    if settings.engine.kind is not EngineKind.SGLANG:
        return ()
    majors = {capability[0] for capability in capabilities if capability is not None}
    return tuple(
        Expression.parse(f"{parameter.name} != {value!r}")
        for parameter in settings.parameters
        if isinstance(parameter, Choices) and parameter.name in PARAMETERS
        for value in parameter.values
        if not all(major in _needed(value) for major in majors)
    )


def _needed(backend: object) -> range:
    needed = NEEDED.get(backend) if isinstance(backend, str) else None
    return range(1000) if needed is None else needed[0]
