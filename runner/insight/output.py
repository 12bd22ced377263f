"""Where the output for people goes: a terminal as it is, or plain lines of one width elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

PLAIN_WIDTH = 100


def print_for_people(stream: TextIO, render: Callable[[Console], None]) -> None:
    """Have `render` print: with colours in a terminal's own width, else in plain lines."""
    if stream.isatty():
        render(Console(file=stream, highlight=False))
        return
    buffer = io.StringIO()
    render(Console(file=buffer, width=PLAIN_WIDTH, color_system=None, highlight=False))
    stream.writelines(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())
