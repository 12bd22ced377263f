"""What is searched: parameters, their conditions, constraints and baselines, resolved and checked.

Parameters are put in an order in which every condition refers to earlier ones only; otherwise the
order is that of server_args.py, not that of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from runner.errors import ConfigError
from runner.expression import FUNCTIONS, Expression
from runner.settings import Baseline, Choices, FloatRange, IntRange, Parameter
from runner.study_file import server_args
from runner.study_file.mistake import Mistakes, show, unknown
from runner.study_file.model import ParameterSection
from runner.trial import Params, ParamValue

NAME = re.compile(r"[a-z][a-z0-9_]*")
BASELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WORDS = frozenset({"and", "or", "not", "in", "if", "else", "is", "true", "false", *FUNCTIONS})


@dataclass(frozen=True, slots=True)
class SpaceReader:
    """Reads the parts of the search space. `constants` are names with a value in this study."""

    constants: Params
    fixed: Params  # engine.args: a fixed parameter cannot be searched as well
    mistakes: Mistakes

    def parameters(self, sections: Mapping[str, ParameterSection]) -> tuple[Parameter, ...]:
        """The parameters in order, without those that were wrong."""
        found: dict[str, Parameter] = {}
        for name in sorted(sections, key=server_args.rank):
            place = f"parameters.{name}"
            wrong = name_mistake(name)
            if name in self.fixed:
                wrong = "also in engine.args, where it is fixed; keep one"
            elif name in self.constants:
                wrong = f"{name!r} is the number of hardware.{name}; use another name"
            if wrong:
                self.mistakes.add(place, wrong)
            elif parameter := _Range(name, sections[name], self.mistakes).read():
                found[name] = parameter
        conditions = {
            name: self.expression(section.when, f"parameters.{name}.when", sections)
            for name, section in sections.items()
            if section.when is not None and name in found
        }
        conditioned = [replace(p, when=conditions.get(p.name)) for p in found.values()]
        return self._ordered(conditioned, set(sections) - set(found))

    def expression(
        self, text: str, place: str, parameters: Mapping[str, object]
    ) -> Expression | None:
        """An expression that names only what exists, None if it does not."""
        try:
            parsed = Expression.parse(text).bind(self.constants)
        except ConfigError as err:
            self.mistakes.add(place, str(err))
            return None
        for name in sorted(parsed.names - set(parameters)):
            names = sorted({*parameters, *self.constants})
            self.mistakes.add(place, f"{text!r}: {unknown('name', name, names)}")
            return None
        return parsed

    def baselines(
        self, sections: Sequence[Params], parameters: Sequence[Parameter]
    ) -> tuple[Baseline, ...]:
        """The baselines as written, with their values checked for type."""
        declared = {parameter.name: parameter for parameter in parameters}
        found: list[Baseline] = []
        for position, section in enumerate(sections):
            place = f"baselines.{position}"
            baseline = self._baseline(section, place, declared)
            for other in found:
                if other.name == baseline.name:
                    self.mistakes.add(f"{place}.name", f"{other.name!r} is taken; names differ")
                elif other.params == baseline.params:
                    self.mistakes.add(place, f"the same setting as baseline {other.name!r}")
            found.append(baseline)
        return tuple(found)

    def _baseline(self, section: Params, place: str, declared: Mapping[str, Parameter]) -> Baseline:
        name = section.get("name")
        if name is None:
            self.mistakes.add(place, "missing name; write for example {name: tp8, tp_size: 8}")
        elif not isinstance(name, str) or not BASELINE_NAME.fullmatch(name):
            allowed = "a name of letters, digits, '.', '_' and '-', at most 100 long"
            self.mistakes.add(f"{place}.name", f"found {show(name)}, expected {allowed}")
        params = {
            key: self._baseline_value(key, value, f"{place}.{key}", declared)
            for key, value in section.items()
            if key != "name"
        }
        return Baseline(str(name), params)

    def _baseline_value(
        self, key: str, value: ParamValue, place: str, declared: Mapping[str, Parameter]
    ) -> ParamValue:
        if key in declared:
            allowed = _type_mistake(declared[key], value)
        else:
            close = get_close_matches(key, declared, n=1, cutoff=server_args.SLIP)
            is_slip = close and key not in server_args.KNOWN
            slip = f"unknown parameter {key!r}; did you mean {close[0]!r}?" if is_slip else None
            wrong = slip or name_mistake(key)
            if wrong:
                self.mistakes.add(place, wrong)
                return value
            allowed = server_args.value_mistake(key, value)
        if allowed:
            self.mistakes.add(place, f"found {show(value)}, expected {allowed}")
        if isinstance(declared.get(key), FloatRange) and isinstance(value, int):
            return float(value)
        return server_args.settle(key, value)

    def _ordered(self, parameters: Sequence[Parameter], missing: set[str]) -> tuple[Parameter, ...]:
        """Every parameter after those its condition names."""
        left = list(parameters)
        ordered: list[Parameter] = []
        placed = set(missing)
        while left:
            ready = next((p for p in left if p.when is None or p.when.names <= placed), None)
            if ready is None:
                circle = " -> ".join(_circle(left))
                place = f"parameters.{left[0].name}.when"
                self.mistakes.add(place, f"conditions go round in a circle: {circle}")
                return tuple(parameters)
            left.remove(ready)
            ordered.append(ready)
            placed.add(ready.name)
        return tuple(ordered)


@dataclass(frozen=True, slots=True)
class _Range:
    """Reads the range of one parameter; the condition is added by the caller."""

    name: str
    section: ParameterSection
    mistakes: Mistakes

    def read(self) -> Parameter | None:
        """The parameter, None when the section does not say exactly one range."""
        section = self.section
        ranges = {
            "choices": section.choices,
            "int": section.int_range,
            "float": section.float_range,
        }
        given = [kind for kind, value in ranges.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            self._add("", f"found {found}, expected exactly one of choices, int and float")
            return None
        if section.step is not None and section.int_range is None:
            self._add("step", f"found a step with {given[0]}; only an int range has one")
        if section.choices is not None:
            return self._choices(section.choices)
        if section.int_range is not None:
            return self._int(section.int_range)
        return self._float(section.float_range or [])

    def _choices(self, values: list[ParamValue]) -> Choices:
        if self.section.log is not None:
            self._add("log", "found log with choices; only an int or float range has it")
        seen: list[ParamValue] = []
        for position, value in enumerate(values):
            allowed = server_args.value_mistake(self.name, value)
            if allowed:
                self._add(f"choices.{position}", f"found {show(value)}, expected {allowed}")
            elif value in seen:
                self._add(f"choices.{position}", f"found {show(value)} twice; keep one")
            seen.append(server_args.settle(self.name, value))
        return Choices(self.name, tuple(seen))

    def _int(self, ends: list[int]) -> IntRange:
        low, high = ends
        self._check_ends("int", low, high)
        step, is_log = self.section.step or 1, bool(self.section.log)
        if step > 1 and is_log:
            self._add("step", "found a step with log: true; keep one of them")
        elif step > max(high - low, 1):
            self._add("step", f"found {step}, larger than the range {show(ends)}")
        if is_log and low < 1:
            self._add("int", f"found low {low} with log: true, expected 1 or more")
        reachable = low + (high - low) // step * step
        return IntRange(self.name, low, reachable, step, is_log)

    def _float(self, ends: list[float]) -> FloatRange:
        low, high = ends
        self._check_ends("float", low, high)
        is_log = bool(self.section.log)
        if is_log and low <= 0:
            self._add("float", f"found low {low} with log: true, expected a number above 0")
        return FloatRange(self.name, low, high, is_log)

    def _check_ends(self, key: str, low: float, high: float) -> None:
        if low > high:
            text = f"found {show([low, high])}, expected [low, high] with low <= high"
            self._add(key, text)
            return
        allowed = next((a for v in (low, high) if (a := self._end_mistake(v))), None)
        if allowed:
            self._add(key, f"found {show([low, high])}, but {self.name} is {allowed}")

    def _end_mistake(self, value: float) -> str | None:
        return server_args.value_mistake(self.name, value)

    def _add(self, key: str, text: str) -> None:
        place = f"parameters.{self.name}.{key}" if key else f"parameters.{self.name}"
        self.mistakes.add(place, text)


def name_mistake(name: str) -> str | None:
    """What is wrong with the name of a server parameter, None if nothing is."""
    wrong = server_args.name_mistake(name)
    if wrong is None and (not NAME.fullmatch(name) or name in WORDS):
        return f"found the name {name!r}, expected lower-case letters, digits and '_'"
    return wrong


def _type_mistake(parameter: Parameter, value: ParamValue) -> str | None:
    """What a baseline's value may be for a declared parameter; its range does not bind it."""
    if parameter.name in server_args.KNOWN:
        return server_args.value_mistake(parameter.name, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match parameter:
        case IntRange():
            return None if is_number and isinstance(value, int) else "a whole number"
        case FloatRange():
            return None if is_number else "a number"
        case Choices(values=values):
            kinds = {type(each) for each in values}
            return None if type(value) in kinds else f"a value like {show(values[0])}"


def _circle(left: Sequence[Parameter]) -> list[str]:
    """The names along one circle of conditions, first and last the same."""
    needs = {p.name: sorted(p.when.names if p.when else ()) for p in left}
    path = [left[0].name]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in needs[path[-1]] if name in needs))
    return path[path.index(path[-1]) :]
