"""One line chart as inline SVG: no script, no font, no colour of its own (the page styles it)."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 16, 44
LINE_HEIGHT = 15
TICKS = 5
LEAST_RANGE = 1e-9


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `style` is its CSS class; a `label` is written at its right end."""

    points: tuple[tuple[float, float], ...]
    title: str
    style: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_high * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series], x_title: str, y_title: str) -> str:
    """An SVG element; later series are drawn on top. No points: a sentence instead."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return '<p class="quiet">No data.</p>'
    xs = sorted({x for line in drawn for x, _ in line.points})
    ticks = y_ticks(max(y for line in drawn for _, y in line.points))
    scale = _Scale(0.0 if len(xs) == 1 else xs[0], xs[-1], ticks[-1])
    parts = [*_axes(scale, xs, ticks), *_titles(x_title, y_title)]
    parts += [_line(line, scale) for line in drawn]
    parts += _labels(drawn, scale)
    name = html.escape(f"{y_title} over {x_title}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        + "".join(parts)
        + "</svg>"
    )


def y_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    if highest < LEAST_RANGE:
        return [0.0, 1.0]
    rough = highest / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= rough)
    return [step * index for index in range(math.ceil(highest / step - 1e-9) + 1)]


def _axes(scale: _Scale, xs: Sequence[float], ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in ticks:
        y = scale.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    parts += [_text(scale.x(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in xs]
    return parts


def _titles(x_title: str, y_title: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        _text(middle, HEIGHT - 6, x_title, "middle"),
        (
            f'<text class="axis" text-anchor="middle" transform="translate(12 {HEIGHT / 2:.0f}) '
            f'rotate(-90)">{html.escape(y_title)}</text>'
        ),
    ]


def _line(line: Series, scale: _Scale) -> str:
    dots = [(scale.x(x), scale.y(y)) for x, y in sorted(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in dots)
    return (
        f'<g class="series {html.escape(line.style)}"><title>{html.escape(line.title)}</title>'
        f'<polyline points="{path}"/>{circles}</g>'
    )


def _labels(drawn: Sequence[Series], scale: _Scale) -> list[str]:
    """Labels right of the last points, pushed apart so that none covers another."""
    labelled = [(scale.y(max(line.points)[1]), line) for line in drawn if line.label]
    labelled.sort(key=lambda pair: pair[0])
    parts: list[str] = []
    lowest = float(TOP - LINE_HEIGHT)
    for wanted, line in labelled:
        y = lowest = max(wanted, lowest + LINE_HEIGHT)
        x = scale.x(max(line.points)[0]) + 8
        parts.append(_text(x, y + 4, line.label, "start", f"label {line.style}"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, style: str = "axis") -> str:
    return (
        f'<text class="{html.escape(style)}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
