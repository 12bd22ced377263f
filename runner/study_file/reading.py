"""The study file on disk: bytes to a plain document, and `--set` on top of it.

YAML read strictly: one document, no duplicate keys, no anchors, no tags; a number is written
plainly. (YAML itself would silently take `010` for 8, `1:30` for 90 and the last of two equal
keys.) Any mistake is one ConfigError with its line and column.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.errors import ConfigError
from runner.study_file.mistake import near_match, show

LARGEST_BYTES = 1_000_000
DEEPEST = 20
NUMBERS = (
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})$"), "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"""[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$
            |[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$""",
            re.VERBOSE,
        ),
        "-+0123456789.",
    ),
)
KEPT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors, tags, equal keys and odd spellings of numbers."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors, tags and too deep nesting; the nodes themselves are PyYAML's."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # so in PyYAML's stubs
        if getattr(event, "anchor", None) is not None:
            raise _marked("an anchor or alias (& or *); write the value out", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _marked("a tag (!); write a plain value", event.start_mark)
        if self.depth >= DEEPEST:
            raise _marked(f"more than {DEEPEST} levels of nesting", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 (PyYAML's signature)
        """Refuse a key that is written twice or is not text."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _marked("a key that is not text; put it in quotes", key.start_mark)
            if key.value in seen:
                raise _marked(f"the key {key.value!r} twice; keep one", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _firsts in NUMBERS:
    StrictLoader.add_implicit_resolver(_tag, _pattern, list(_firsts))


def read_study(path: Path) -> dict[str, object]:
    """The document of a study file; raises ConfigError when there is none."""
    text = read_text(path, LARGEST_BYTES, "a study file")
    document = parse_yaml(text, path.name)
    if document is None:
        raise ConfigError(f"{path} is empty; a study file starts with 'name: my-study'")
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path.name}: found {_kind(document)}, expected sections such as 'name: my-study'"
        )
    return document


def read_text(path: Path, largest_bytes: int, what: str) -> str:
    """The text of a file the user named; `what` says what it should be, e.g. `a study file`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, expected {what}{_listed(path)}")
        if not path.exists():
            raise ConfigError(f"{path} does not exist{_near_file(path)}")
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file, expected {what}")
        with path.open("rb") as file:
            data = file.read(largest_bytes + 1)
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err.strerror}") from err
    if len(data) > largest_bytes:
        raise ConfigError(
            f"{path} has {path.stat().st_size:,} bytes, {what} has at most {largest_bytes:,}"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8 text (line {line}, byte {err.start}); save it as UTF-8"
        ) from err


def parse_yaml(text: str, source: str) -> object:
    """The value of a YAML text; `source` names it in the message."""
    try:
        return yaml.load(text, Loader=StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        at = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"{source}:{at} {_problem(err)}") from err
    except yaml.reader.ReaderError as err:
        line = text.count("\n", 0, err.position) + 1
        raise ConfigError(
            f"{source}: line {line}: the character {chr(_code(err.character))!r} is not allowed"
        ) from err


def override(document: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """A copy of the document with each `path=value` set; values are YAML."""
    changed: dict[str, object] = copy.deepcopy(dict(document))
    for option in overrides:
        path, value = split_override(option)
        _put(changed, path.split("."), value)
    return changed


def split_override(option: str) -> tuple[str, object]:
    """`a.b=value` as path and value."""
    path, equals, text = option.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError(
            f"--set {option}: expected section.key=value, for example search.trials=40"
        )
    return path, parse_yaml(text, f"--set {path}")


def _put(document: dict[str, object], keys: list[str], value: object) -> None:
    at: object = document
    option = ".".join(keys)
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        place = ".".join(keys[:depth])
        if isinstance(at, list):
            if not key.isdecimal() or int(key) >= len(at):
                raise ConfigError(
                    f"--set {option}: {place} is a list of {len(at)}, expected a position "
                    f"from 0 to {len(at) - 1}, found {key!r}"
                )
            if is_last:
                at[int(key)] = value
            at = at[int(key)]
        elif isinstance(at, dict):
            if is_last:
                at[key] = value
            elif at.get(key) is None:
                at[key] = {}
            at = at[key]
        else:
            raise ConfigError(f"--set {option}: {place} is {show(at)}, it has no {key!r}")


def _marked(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=f"found {problem}", problem_mark=mark)


def _problem(err: yaml.MarkedYAMLError) -> str:
    problem = err.problem or "this is not YAML"
    if "'\\t'" in problem:
        return "found a tab; indent with spaces"
    if isinstance(err, yaml.composer.ComposerError) and "document" in f"{err.context} {problem}":
        return "found a second document (---); a study file has one"
    return problem if problem.startswith("found ") else f"this is not YAML: {problem}"


def _code(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1])


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else show(value)


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; nor does the folder {path.parent}"
    names = sorted(child.name for child in path.parent.iterdir() if child.is_file())
    close = near_match(path.name, names) or next(
        (n for n in names if Path(n).stem == path.name), None
    )
    return f"; did you mean {path.with_name(close)}?" if close else _listed(path.parent)


def _listed(folder: Path) -> str:
    names = sorted(child.name for child in folder.glob("*.yaml"))
    return f"; {folder} has {', '.join(names[:10])}" if names else ""
