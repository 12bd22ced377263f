"""One fault as it is asked for: KIND[:ARGUMENT][@rate=SHARE][@when=EXPRESSION]."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches

from runner.engines.emulator.faults.arguments import Argument, share
from runner.engines.emulator.faults.kind import FORMS, FaultKind
from runner.errors import ConfigError

OPTIONS = ("rate", "when")
_OPTION = re.compile(r"@(?=\s*\w+\s*=)")
_BETWEEN = re.compile(r"\s*;\s*")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `rate` is the share of launches it hits, `when` a condition on the settings."""

    kind: FaultKind
    argument: Argument = field(default_factory=Argument)
    rate: float = 1.0
    when: str | None = None
    text: str = ""

    @property
    def number(self) -> float:
        """The first number of its argument."""
        return self.argument.numbers[0]


def parse_faults(text: str, names: Collection[str]) -> tuple[Fault, ...]:
    """Read one fault or several with ';' between them; `none` is left out.

    `names` are the settings that a condition may speak of. Raises ValueError with one message
    that says what was found and what is known.
    """
    faults = [_parse(part, names) for part in _BETWEEN.split(text.strip())]
    return tuple(fault for fault in faults if fault.kind is not FaultKind.NONE)


def _parse(text: str, names: Collection[str]) -> Fault:
    head, *options = _OPTION.split(text)
    name, _, written = head.partition(":")
    kind = _kind(name.strip(), text)
    form = FORMS[kind]
    try:
        argument = form.read(written.strip())
    except ValueError as err:
        raise ValueError(f"{kind} takes {err}; found {text!r}") from err
    rate, when = 1.0, form.when
    for option in options:
        key, _, value = option.partition("=")
        match key.strip():
            case "rate":
                rate = _rate(value.strip(), text)
            case "when":
                when = _condition(value.strip(), text, names)
            case other:
                known = ", ".join(OPTIONS)
                raise ValueError(f"unknown option {other!r} in fault {text!r}; known are {known}")
    return Fault(kind, argument, rate, when, text)


def _kind(name: str, text: str) -> FaultKind:
    known = [kind.value for kind in FaultKind]
    if name in known:
        return FaultKind(name)
    close = get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    found = f"unknown fault {name!r}" if name == text else f"unknown fault {name!r} in {text!r}"
    raise ValueError(f"{found}; {meant}known are {', '.join(known)}")


def _rate(value: str, text: str) -> float:
    try:
        return share(value).numbers[0]
    except ValueError as err:
        raise ValueError(f"rate takes {err}; found {value!r} in fault {text!r}") from err


def _condition(value: str, text: str, names: Collection[str]) -> str:
    from runner.expression import Expression  # costs a start what most starts do not need

    try:
        expression = Expression.parse(value)
    except ConfigError as err:
        raise ValueError(f"when in fault {text!r}: {err}") from err
    for name in sorted(expression.names - set(names)):
        close = get_close_matches(name, names, n=1)
        meant = f"did you mean {close[0]!r}?" if close else "write SGLang's names with underscores"
        raise ValueError(f"when in fault {text!r}: unknown setting {name!r}; {meant}")
    return value
