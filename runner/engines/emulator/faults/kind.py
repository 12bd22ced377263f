"""The kinds of fault: their names, what each takes after its colon, and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from runner.engines.emulator.faults.arguments import (
    Reader,
    any_text,
    count,
    counts,
    no_argument,
    one_of,
    optional_count,
    requests_or_tokens,
    seconds,
    seconds_and_share,
    share,
    signed_count,
)


class FaultKind(StrEnum):
    """What goes wrong."""

    NONE = "none"
    DIE_AT_START = "die-at-start"
    HANG_AT_START = "hang-at-start"
    OUT_OF_MEMORY = "out-of-memory"
    PORT_TAKEN = "port-taken"
    HANG_IN_WARM_UP = "hang-in-warm-up"
    REFUSE_FLAG = "refuse-flag"
    DIE_AFTER_REQUESTS = "die-after-requests"
    STOP_SENDING = "stop-sending"
    GHOST_REQUESTS = "ghost-requests"
    HOLD_MEMORY = "hold-memory"
    LEAVE_CHILD = "leave-child"
    CHUNKS = "chunks"
    WRONG_COUNTS = "wrong-counts"
    SHORT_OUTPUT = "short-output"
    STREAM_ERRORS = "stream-errors"
    GARBLED_OUTPUT = "garbled-output"
    HEAT = "heat"
    CACHED_PROMPTS = "cached-prompts"


@dataclass(frozen=True, slots=True)
class Form:
    """One kind for the user: how its argument is written and read, and one line of help.

    `when` is the condition that holds where none is given.
    """

    argument: str
    read: Reader
    help: str
    when: str | None = None


FORMS: Mapping[FaultKind, Form] = {
    FaultKind.NONE: Form("", no_argument, "no fault (for a searched parameter)"),
    FaultKind.DIE_AT_START: Form(
        "[:TEXT]", any_text, "every rank's traceback, TEXT the first one's reason; exit -9"
    ),
    FaultKind.HANG_AT_START: Form("", no_argument, "no line and no port after the first phase"),
    FaultKind.OUT_OF_MEMORY: Form(
        "[:capture|load]",
        one_of("capture", "load"),
        "CUDA out of memory while graphs are captured, or at load",
    ),
    FaultKind.PORT_TAKEN: Form(
        "[:TRIES]", optional_count, "its port is in use when it binds, in a launch's first TRIES"
    ),
    FaultKind.HANG_IN_WARM_UP: Form(
        "", no_argument, "the port opens, then /health says 503 and the log nothing, for ever"
    ),
    FaultKind.REFUSE_FLAG: Form(
        "[:FLAG]", any_text, "FLAG (default: the first one given) is unknown; exit 2"
    ),
    FaultKind.DIE_AFTER_REQUESTS: Form(
        ":N", count, "a traceback and exit -9 in mid-stream, once N requests were answered"
    ),
    FaultKind.STOP_SENDING: Form(
        ":N[requests|tokens]",
        requests_or_tokens,
        "after so many: headers and no tokens, aborts unheard, the process lives",
    ),
    FaultKind.GHOST_REQUESTS: Form(
        "[:N]", optional_count, "requests (at most N) outlive their client and any abort"
    ),
    FaultKind.HOLD_MEMORY: Form(
        ":S", seconds, "its GPU memory stays in use for S seconds after its end"
    ),
    FaultKind.LEAVE_CHILD: Form(
        "[:session]",
        one_of("", "session"),
        "a child with GPU memory outlives it, in its group or in a session of its own",
    ),
    FaultKind.CHUNKS: Form(
        ":N[,N]...", counts, "chunks of so many tokens, in turn, again and again"
    ),
    FaultKind.WRONG_COUNTS: Form(
        ":+N|-N", signed_count, "the last of an answer's completion_tokens is N too many or too few"
    ),
    FaultKind.SHORT_OUTPUT: Form(
        ":N", count, "N tokens fewer than asked for are produced, but all are counted"
    ),
    FaultKind.STREAM_ERRORS: Form(
        ":SHARE", share, "this share of the streams ends in an error event, under a 200"
    ),
    FaultKind.GARBLED_OUTPUT: Form(
        "",
        no_argument,
        "one token of every answer is another one; by default where depth > 1",
        when="pp_async_batch_depth > 1",
    ),
    FaultKind.HEAT: Form(
        ":S,SHARE", seconds_and_share, "after S seconds of load the GPUs' clock falls by SHARE"
    ),
    FaultKind.CACHED_PROMPTS: Form(
        "", no_argument, "every prompt counts as cached but for its last token"
    ),
}


def help_text() -> str:
    """One line for each kind, and what they have in common."""
    spelled = {kind: f"{kind}{form.argument}" for kind, form in FORMS.items()}
    width = max(map(len, spelled.values()))
    lines = [f"  {spelled[kind]:{width}}  {form.help}" for kind, form in FORMS.items()]
    return "\n".join(
        (
            "faults, KIND[:ARG][@rate=SHARE][@when=EXPRESSION], or several with ';' between them:",
            *lines,
            "  @rate=0.2           hits this share of the launches, drawn from --fault-seed",
            "  @when='pp_size>1'   hits where this holds of the server's settings",
        )
    )
