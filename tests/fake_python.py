"""A stand-in for the Python of an environment that has SGLang: its version, its --help, no server.

What it answers stands in the folder beside the program that `install` makes; `asked` in that
folder has a line for each question.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """\
#!{python} -ISs
import json, sys, time
from pathlib import Path
folder = Path(__file__).parent
told = json.loads((folder / "told.json").read_text())
kind = "version" if sys.argv[1] == "-c" else "help"
with (folder / "asked").open("a") as asked:
    asked.write(kind + "\\n")
if kind == "version":
    if told["version"] is None:
        sys.exit(3)
    print(json.dumps({{key: told[key] for key in ("version", "folder", "marks")}}))
    sys.exit()
assert sys.argv[1:] == ["-m", "sglang.launch_server", "--help"], sys.argv
if told["crash"] is not None:
    sys.exit(told["crash"])
time.sleep(told["delay_s"])
print((folder / "help.txt").read_text())
"""


@dataclass(frozen=True)
class FakePython:
    """An interpreter in a folder."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder / "python")

    def asked(self) -> list[str]:
        """The questions so far: `version` or `help`."""
        path = self.folder / "asked"
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    def install(
        self,
        version: str | None,
        help_text: str = "",
        *,
        mark: int = 0,
        crash: str | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Give it this SGLang (None: none). `mark` tells one installation from the next."""
        told: dict[str, object] = {
            "version": version,
            "folder": str(self.folder),
            "marks": [[mark, 1]],
        }
        told |= {"crash": crash, "delay_s": delay_s}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
        (self.folder / "help.txt").write_text(help_text, encoding="utf-8")
        program = self.folder / "python"
        program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)
