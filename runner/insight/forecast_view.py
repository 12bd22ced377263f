"""What a prediction and a plan look like to a person, and how far they are while they compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from runner.forecast.predict import Progress
from runner.forecast.prediction import Prediction, RungPrediction
from runner.forecast.setting import study_profile
from runner.insight.live import duration_words
from runner.insight.output import print_for_people
from runner.insight.words import format_number, not_modelled_words
from runner.label import setting_label
from runner.launch import world_size
from runner.lengths import law_words
from runner.settings import StudySettings
from runner.trial import LoadProtocol, Params

PADDING = (0, 2, 0, 0)
SILENT_S = 1.0  # what takes less needs no progress
LINE_EVERY_S = 5.0  # where nothing can be overwritten
REDRAW_S = 0.2
LEAST_GAIN = 0.03  # a smaller share says nothing of the time that is left
CUT_OFF_WORDS = (
    "Outputs are so long that rungs were cut off before they ended: their throughput may be far "
    "too low. Predict with shorter ones: --set workload.output_tokens=..."
)
LARGE = 0.05  # a share by which it matters how a load began
PROTOCOL_WORDS = {
    LoadProtocol.CLOSED_LOOP: "closed loop",
    LoadProtocol.BURST: "burst",
    LoadProtocol.OPEN_LOOP: "open loop",
}


class ProgressLine:
    """One line that says how far a computation is, from its second second on."""

    def __init__(
        self, stream: TextIO, what: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._what = what
        self._now = now
        self._due_s = now() + SILENT_S
        self._first: tuple[float, float] | None = None
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Show how far it is, if that is due."""
        now_s = self._now()
        share = min(progress.done / progress.total, 1.0) if progress.total > 0 else 1.0
        if self._first is None:
            self._first = (now_s, share)
        if now_s < self._due_s:
            return
        line = f"{self._what}: {share:.0%}"
        since_s, gained = now_s - self._first[0], share - self._first[1]
        if gained > LEAST_GAIN:
            line += f", about {duration_words(since_s * (1.0 - share) / gained)} left"
        if self._stream.isatty():
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
            self._due_s = now_s + REDRAW_S
        else:
            self._stream.write(line + "\n")
            self._due_s = now_s + LINE_EVERY_S
        self._stream.flush()

    def close(self) -> None:
        """Wipe the line where it can be wiped."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


def print_prediction(
    prediction: Prediction, settings: StudySettings, params: Params, stream: TextIO
) -> None:
    """The rungs of one setting, then what they stand on."""
    title = Text(f"{settings.name}: {setting_label(params)}", style="bold")
    if prediction.refused is not None:
        show([title, Text(f"This setting cannot run: {prediction.refused}.")], stream)
        return
    sentences = [
        Text(load_words(settings)),
        Text(_spread_words(prediction)),
        Text(
            "TTFT and TPOT: means over requests. Busy stages and slots: of one server. W: all GPUs."
        ),
        Text(model_words(settings)),
    ]
    unmeasured = unmeasured_words(settings, world_size({**settings.engine.args, **params}))
    if unmeasured is not None:
        sentences.append(Text(unmeasured, style="yellow"))
    sentences += [Text(words, style="yellow") for words in _start_words(prediction)]
    if prediction.not_modelled:
        sentences.append(Text(not_modelled_words(prediction.not_modelled), style="yellow"))
    if prediction.is_cut_off:
        sentences.append(Text(CUT_OFF_WORDS, style="yellow"))
    show([title, _rung_table(prediction), *sentences], stream)


def show(parts: list[RenderableType], stream: TextIO) -> None:
    """Print for the terminal, or as plain lines elsewhere."""

    def render(console: Console) -> None:
        for part in parts:
            console.print(part)

    print_for_people(stream, render)


def load_words(settings: StudySettings) -> str:
    """For example `Closed loop: prompt 64 tokens, output 64 - 192 tokens.`."""
    work = settings.workload
    words = PROTOCOL_WORDS[work.protocol].capitalize()
    prompt, output = law_words(work.prompt_tokens), law_words(work.output_tokens)
    return f"{words}: prompt {prompt}, output {output}."


def model_words(settings: StudySettings) -> str:
    """Whose numbers these are, and how far they were off."""
    profile = study_profile(settings)
    fit = f", {profile.fit}" if profile.fit else ""
    return f"By the model of {profile.name}{fit}; p10 - p90 is the spread over seeds alone."


def unmeasured_words(settings: StudySettings, largest: int) -> str | None:
    """A warning where a server of `largest` GPUs is larger than any the profile was fitted to."""
    profile = study_profile(settings)
    measured = profile.measured_gpus
    if measured is None or largest <= measured:
        return None
    size = "one GPU" if measured == 1 else f"at most {measured} GPUs"
    return (
        f"{profile.name} was measured with servers of {size} only. Nothing was measured of larger "
        "ones, so the accuracy above does not hold for them: they are a guess."
    )


def level_title(settings: StudySettings) -> str:
    """What a rung is called in this study."""
    return "rate/s" if settings.workload.protocol is LoadProtocol.OPEN_LOOP else "C"


def _rung_table(prediction: Prediction) -> Table:
    table = Table(box=None, padding=PADDING, pad_edge=False)
    is_open = prediction.protocol is LoadProtocol.OPEN_LOOP
    titles = ["rate/s" if is_open else "C", "tok/s", "p10 - p90", "TTFT s", "TPOT ms"]
    for title in (*titles, "busy stages", "slots", "power W"):
        table.add_column(title, justify="right", no_wrap=True)
    for rung in prediction.rungs:
        table.add_row(
            f"{rung.level:g}",
            format_number(rung.output_throughput),
            range_words(rung),
            format_number(rung.ttft_s),
            format_number(rung.tpot_s * 1000),
            f"{rung.busy_stages:.1f}",
            f"{rung.slots:.1f}",
            format_number(rung.power_w),
        )
    return table


def range_words(rung: RungPrediction) -> str:
    """The 10th and 90th percentile over seeds; a dash where seeds agree."""
    if rung.p10 is None or rung.p90 is None:
        return "-"
    return f"{format_number(rung.p10)} - {format_number(rung.p90)}"


def _spread_words(prediction: Prediction) -> str:
    if prediction.seeds == 1:
        return "Simulated under one seed; more of them (--seeds) show how far they differ."
    widest = max(prediction.rungs, key=lambda rung: rung.spread)
    words = f"Median of {prediction.seeds} seeds; from p10 to p90 they differ by at most "
    return f"{words}{widest.spread:.1%} (at {widest.level:g})."


def _start_words(prediction: Prediction) -> Iterator[str]:
    """Where the throughput depends on how the load began."""
    for rung in prediction.rungs:
        apart, together = rung.output_throughput, rung.together
        if together is not None and abs(together - apart) > LARGE * apart:
            yield (
                f"At C={rung.level:g} it depends on how the load began: {format_number(together)} "
                f"tokens/s where all streams begin together, as in most benchmarks, "
                f"{format_number(apart)} where they begin one after another, as a study begins "
                "them. Replies of uneven lengths, as in traffic, forget it: expect the latter, or "
                "less."
            )
