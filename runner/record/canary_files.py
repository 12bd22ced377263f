"""The canary on disk: what each trial's servers said, and what the study compares them with.

`trials/N/canary.json` is written before anything judges it; `canary.json` of the study has one
reference for each set of numerics, from the first complete trial that has them.
"""

from __future__ import annotations

from pathlib import Path

from runner.canary import PROMPTS, PROMPTS_DIGEST, CanaryRecord, CanaryReference
from runner.record.codec import decode, fields_of
from runner.record.files import damaged, read_json, write_json
from runner.trial import Params

SCHEMA_VERSION = 1
FILE = "canary.json"
REMEDY = "Delete it: it is made again from what the trials keep"

REMEDY_OF_TRIAL = "Delete it: another complete trial takes its place"


class CanaryFiles:
    """The canary of one study; `folder` is the study's."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def write(self, folder: Path, record: CanaryRecord) -> None:
        """Keep what a trial's servers said, in the trial's folder; a later answer replaces it."""
        content = {"schema_version": SCHEMA_VERSION, **fields_of(record)}
        write_json(folder / FILE, content, indent=None)

    def reference(self, numerics: Params) -> CanaryReference | None:
        """What settings with these numerics are compared with; None: nothing yet."""
        alike = (each for each in self._references() if each.numerics == numerics)
        return next(alike, None)

    def adopt(self, folder: Path) -> None:
        """Make a complete trial's outputs the reference, where its numerics have none yet."""
        path = folder / FILE
        if not path.exists():
            return
        try:
            record = decode(CanaryRecord, read_json(path, REMEDY_OF_TRIAL))
        except ValueError as error:
            raise damaged(path, error, REMEDY_OF_TRIAL) from error
        if record.prompts != PROMPTS_DIGEST or self.reference(record.numerics) is not None:
            return
        if not record.outputs or len(record.outputs[0]) != len(PROMPTS):
            raise damaged(path, "outputs are missing", REMEDY_OF_TRIAL)
        new = CanaryReference(record.trial, record.launch, record.numerics, record.outputs[0])
        content = {
            "schema_version": SCHEMA_VERSION,
            "references": [*map(fields_of, self._references()), fields_of(new)],
        }
        write_json(self._path, content, indent=None)

    def _references(self) -> tuple[CanaryReference, ...]:
        """Those of the prompts that are sent today."""
        try:
            document = read_json(self._path, REMEDY)
            found = decode(tuple[CanaryReference, ...], document.get("references"))
        except FileNotFoundError:
            return ()
        except ValueError as error:
            raise damaged(self._path, error, REMEDY) from error
        if any(len(each.outputs) != len(PROMPTS) for each in found):
            raise damaged(self._path, "outputs are missing", REMEDY)
        return tuple(each for each in found if each.prompts == PROMPTS_DIGEST)
