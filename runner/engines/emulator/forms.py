"""What each route says of a whole exchange: its documents, and how its streams close."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engines.emulator.answers import (
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    UsageOptions,
    usage,
)
from runner.engines.emulator.exchange import Part


class GenerateForm:
    """/generate: an object, or a list of objects when a list was asked for."""

    def __init__(self, answers: Sequence[GenerateAnswer], *, is_list: bool) -> None:
        self._answers = answers
        self._is_list = is_list

    def closing(self, parts: Sequence[Part]) -> bytes:
        """Nothing: the last token says everything."""
        del parts
        return b""

    def document(self, parts: Sequence[Part]) -> bytes:
        documents = [
            answer.document(part.tokens, part.finish)
            for answer, part in zip(self._answers, parts, strict=True)
        ]
        return b"[%b]" % b",".join(documents) if self._is_list else documents[0]


class OpenAiForm:
    """The OpenAI routes: one choice per continuation. Usage counts each prompt once."""

    def __init__(
        self,
        answers: Sequence[CompletionAnswer | ChatAnswer],
        prompt_tokens: int,
        cached_tokens: int,
        options: UsageOptions,
    ) -> None:
        self._answers = answers
        self._prompt_tokens = prompt_tokens
        self._details = {"cached_tokens": cached_tokens} if options.has_cached else None
        self._has_closing = options.at_end

    def closing(self, parts: Sequence[Part]) -> bytes:
        """The chunk without choices, when the client asked for it."""
        if not self._has_closing:
            return b""
        counts = self._usage(parts)
        if self._details is not None:
            counts["prompt_tokens_details"] = self._details
        return self._answers[-1].usage_event(counts)

    def document(self, parts: Sequence[Part]) -> bytes:
        choices = [
            answer.choice(part.tokens, part.finish)
            for answer, part in zip(self._answers, parts, strict=True)
        ]
        counts = {**self._usage(parts), "prompt_tokens_details": self._details}
        return self._answers[0].document(choices, counts)

    def _usage(self, parts: Sequence[Part]) -> dict[str, object]:
        return usage(self._prompt_tokens, sum(part.tokens for part in parts))
