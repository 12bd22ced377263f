"""The last words of a server that a fault ends, in SGLang's own."""

from __future__ import annotations

import re

from runner.engines.emulator.faults.fault import Fault

DEFAULT_REASON = "IndexError: list index out of range"
_CLASS = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")
_CAPTURE_HINTS = """\
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)
3. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose"""


def start_reason(fault: Fault) -> str:
    """Why a server dies at its start; a text that names no exception becomes a RuntimeError."""
    text = fault.argument.text or DEFAULT_REASON
    return text if _CLASS.match(text) else f"RuntimeError: {text}"


def capture_reason(out_of_memory: str) -> str:
    """What SGLang makes of an exception while it captures graphs."""
    message = out_of_memory.partition(": ")[2]
    return f"Exception: Capture cuda graph failed: {message}\n{_CAPTURE_HINTS}"
