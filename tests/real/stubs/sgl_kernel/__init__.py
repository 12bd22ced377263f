"""Stands in for SGLang's CUDA kernels, whose names it imports on a CPU and never calls there."""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return unavailable
