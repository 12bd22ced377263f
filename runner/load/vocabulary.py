"""Which token ids prompts are made of: a server dies of an id that its model does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOWEST_TOKEN_ID = 1000
HIGHEST_TOKEN_ID = 30000
SPECIAL_SHARE = 8
"""Of a small vocabulary the first eighth is left out: special tokens and bytes come first."""
SIZE = "vocab_size"
TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids `lowest` .. `lowest + count - 1`."""

    lowest: int = LOWEST_TOKEN_ID
    count: int = HIGHEST_TOKEN_ID - LOWEST_TOKEN_ID + 1

    @classmethod
    def of(cls, size: int | None) -> Vocabulary:
        """The ids to use for a model with so many tokens; None: not known, and thought large."""
        if size is None or size > HIGHEST_TOKEN_ID:
            return cls()
        lowest = min(LOWEST_TOKEN_ID, size // SPECIAL_SHARE)
        return cls(lowest, size - lowest)


def vocabulary_size(model: str) -> int | None:
    """How many tokens the model in a folder has; None where its config.json does not tell.

    Models of text and images tell it in the part of their configuration that is about text.
    """
    if not model:  # or the current folder would be read
        return None
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    whole = config if isinstance(config, Mapping) else {}
    parts = (part for part in (whole, *map(whole.get, TEXT_PARTS)) if isinstance(part, Mapping))
    sizes = [part[SIZE] for part in parts if isinstance(part.get(SIZE), int) and part[SIZE] > 1]
    return min(sizes, default=None)
