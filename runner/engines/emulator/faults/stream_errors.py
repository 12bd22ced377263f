"""A stream that ends in an error event although its status was 200."""

from __future__ import annotations

from runner.engines.emulator.answers import encode
from runner.engines.emulator.reply import Reply

EVENT = b"data: %b\n\n" % encode(
    {
        "error": {
            "message": "Internal server error (an emulated fault)",
            "type": "server_error",
            "code": 500,
            "retryable": True,
        }
    }
)


class FailingSink:
    """Lets one token through, then fails the reply."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def deliver(self, completion_tokens: int, now_s: float, *, is_last: bool) -> None:
        """The request has `completion_tokens` tokens now."""
        if not is_last:
            self._reply.deliver(completion_tokens, now_s, is_last=False)
        self._reply.fail(EVENT, now_s)
