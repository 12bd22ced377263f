"""Expressions of a study file (`when`, `constraints`), evaluated by simpleeval, never by eval.

The grammar is a short white list, checked when the expression is read: comparisons, `and`, `or`,
`not`, `in`, arithmetic, lists of values and min, max, abs. An expression answers true or false;
a number is an error (`tp_size * pp_size` where `== 8` was forgotten), not a truth.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from simpleeval import EvalWithCompoundTypes, InvalidExpression, NameNotDefined

from runner.errors import ConfigError
from runner.trial import Params, ParamValue

FUNCTIONS = {"min": min, "max": max, "abs": abs}
MAX_LENGTH = 300
MAX_NODES = 150
ALLOWED = (
    *(ast.Compare, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.IfExp),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple, ast.Call),
)


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression over parameter names, e.g. `tp_size * pp_size == 8`.

    `bound` are names with a fixed value in this study (gpus, nodes, fixed server arguments);
    they are known without being handed in.
    """

    text: str
    bound: tuple[tuple[str, ParamValue], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Check the grammar; raises ConfigError with the text when it is not an expression."""
        _tree(text)
        return cls(text)

    def bind(self, values: Mapping[str, ParamValue]) -> Expression:
        """The same expression, knowing those of `values` that it names."""
        used = _names(self.text)
        return Expression(self.text, tuple((n, values[n]) for n in sorted(used & set(values))))

    @property
    def names(self) -> frozenset[str]:
        """Every name whose value must be handed in."""
        return _names(self.text) - {name for name, _ in self.bound}

    def decide(self, values: Params) -> bool | None:
        """Whether the expression is true; None when deciding it takes a name without a value.

        `and` and `or` stop at the first side that decides, so `pp_size > 1 and depth > 2` is
        false where pp_size is 1 and there is no depth. Raises ConfigError when it cannot be
        evaluated (a division by zero, text compared with a number).
        """
        try:
            return self._evaluate(values)
        except NameNotDefined:
            return None

    def holds(self, values: Params) -> bool:
        """Like decide, but a name without a value is an error."""
        try:
            return self._evaluate(values)
        except NameNotDefined as err:
            known = ", ".join(sorted({**dict(self.bound), **values})) or "none"
            raise ConfigError(f"{self.text!r}: {err.name!r} has no value; known: {known}") from err

    def _evaluate(self, values: Params) -> bool:
        evaluator = EvalWithCompoundTypes(
            names={**dict(self.bound), **values}, functions=dict(FUNCTIONS)
        )
        try:
            result = evaluator.eval(self.text, _tree(self.text))
        except NameNotDefined:
            raise
        except (InvalidExpression, ArithmeticError, TypeError, ValueError) as err:
            shown = ", ".join(f"{name}={values[name]}" for name in sorted(self.names & set(values)))
            at = f" for {shown}" if shown else ""
            raise ConfigError(f"{self.text!r} cannot be evaluated{at}: {err}") from err
        if not isinstance(result, bool):
            raise ConfigError(
                f"{self.text!r} gives {result!r}, not true or false; compare it with something"
            )
        return result


@lru_cache(maxsize=1024)
def _names(text: str) -> frozenset[str]:
    nodes = tuple(ast.walk(_tree(text)))
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = (node for node in nodes if isinstance(node, ast.Name) and id(node) not in functions)
    return frozenset(node.id for node in names)


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"an expression of {len(text)} characters; at most {MAX_LENGTH}")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise ConfigError(
            f"{text!r} is not an expression; write for example 'pp_size > 1'"
        ) from err
    nodes = tuple(ast.walk(body))
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"{text!r} is too long; split it into several constraints")
    for node in nodes:
        if not _is_allowed(node):
            raise ConfigError(
                f"{text!r} uses {_describe(node)}; allowed are names, numbers, texts, comparisons, "
                f"in, and, or, not, + - * / // %, and {', '.join(FUNCTIONS)}"
            )
    return body


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return is_known and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float | str)
    return isinstance(node, ALLOWED)


def _describe(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return f"the call {ast.unparse(node)!r}"
    if isinstance(node, ast.expr):
        return repr(ast.unparse(node))
    return f"the operator {type(node).__name__}"
