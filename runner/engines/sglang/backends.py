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
    "fa3": range(8, 10),
    "trtllm_mha": range(10, 100),
    "trtllm_mla": range(10, 100),
    **dict.fromkeys(("intel_amx", "intel_xpu", "ascend", "aiter", "wave"), range(0)),
}
"""Backend to the major compute capabilities that it runs on; none: on no NVIDIA GPU."""


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
        if value in NEEDED and not majors <= set(NEEDED[str(value)])
    )
