"""The HTTP control plane of one SGLang server: readiness, live state, draining.

The only user of `requests`. Every call has a timeout, in seconds of the wall clock; a refused
connection, a timeout or an answer that makes no sense is ServerFailed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import requests

from runner.errors import ServerFailed

_CONNECT_WALL_S = 3.0
READ_WALL_S = 10.0
_HEALTH_WALL_S = 25.0  # the server itself gives a health check 20 s
_GENERATE_WALL_S = 300.0  # the first request may compile kernels
_PROBE_TOKENS = tuple(range(100, 108))
_OK = 200
_NOT_FOUND = 404


class Control:
    """A conversation with one server; used from one thread at a time."""

    def __init__(self, url: str, log_path: str, read_wall_s: float = READ_WALL_S) -> None:
        self.url = url
        self._read_wall_s = read_wall_s
        self._log_path = log_path
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the environment is not for this machine

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def is_healthy(self) -> bool:
        """Whether the server answers and says that it is up; no answer is no."""
        try:
            return self._ask("GET", "/health", wall_s=_HEALTH_WALL_S).status_code == _OK
        except ServerFailed:
            return False

    def generate_one(self) -> None:
        """Have one token generated; raises ServerFailed if none comes."""
        body = {
            "input_ids": list(_PROBE_TOKENS),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        answer = self._object("POST", "/generate", body, wall_s=_GENERATE_WALL_S)
        meta = answer.get("meta_info")
        tokens = meta.get("completion_tokens") if isinstance(meta, Mapping) else None
        if tokens != 1:
            raise self._failed(f"a request for one token was answered with {str(answer)[:200]}")

    def continue_greedily(self, prompt: Sequence[int], tokens: int) -> Mapping[str, object]:
        """Have the most likely tokens generated; log-probabilities if the server gives them."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        told = {**body, "return_logprob": True, "top_logprobs_num": 2}
        answer = self._ask("POST", "/generate", told, _GENERATE_WALL_S)
        if answer.status_code == _OK:
            return self._parse("/generate", answer)
        return self._object("POST", "/generate", body, _GENERATE_WALL_S)

    def server_info(self) -> Mapping[str, object]:
        """The resolved arguments and the live state."""
        return self._object("GET", "/server_info")

    def set_internal_state(self, values: Mapping[str, int]) -> None:
        """Ask for live values. The answer proves nothing: read them back."""
        answer = self._ask("POST", "/set_internal_state", {"server_args": dict(values)})
        if answer.status_code != _OK:
            raise self._failed(f"/set_internal_state answered {answer.status_code}")

    def abort_all(self) -> None:
        """Abort every request, running or waiting."""
        answer = self._ask("POST", "/abort_request", {"abort_all": True})
        if answer.status_code != _OK:
            raise self._failed(f"/abort_request answered {answer.status_code}")

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False if the server is not idle."""
        return self._ask("POST", "/flush_cache").status_code == _OK

    def waiting_requests(self) -> int:
        """Requests in the queue; 0 when this version does not tell.

        The running count is not used: with pipeline parallelism it is that of one micro-batch.
        """
        answer = self._ask("GET", "/v1/loads")
        if answer.status_code == _NOT_FOUND:
            return 0
        loads = self._parse("/v1/loads", answer).get("loads")
        if not isinstance(loads, list):
            raise self._failed("/v1/loads answered without loads")
        return sum(_whole(load, "num_waiting_reqs") for load in loads)

    def metrics(self) -> str | None:
        """The text of /metrics; None when this server has none."""
        answer = self._ask("GET", "/metrics")
        if answer.status_code == _NOT_FOUND:
            return None
        if answer.status_code != _OK:
            raise self._failed(f"/metrics answered {answer.status_code}")
        return answer.text

    def _object(
        self, method: str, path: str, body: object = None, wall_s: float | None = None
    ) -> Mapping[str, object]:
        answer = self._ask(method, path, body, wall_s)
        if answer.status_code != _OK:
            raise self._failed(f"{path} answered {answer.status_code}: {answer.text[:200]}")
        return self._parse(path, answer)

    def _ask(
        self, method: str, path: str, body: object = None, wall_s: float | None = None
    ) -> requests.Response:
        wall_s = wall_s or self._read_wall_s
        try:
            return self._session.request(
                method, self.url + path, json=body, timeout=(_CONNECT_WALL_S, wall_s)
            )
        except requests.Timeout as error:
            raise self._failed(f"{path} was not answered in {wall_s:g} s") from error
        except requests.RequestException as error:
            raise self._failed(f"{path} was not answered: {_reason(error)}") from error

    def _parse(self, path: str, answer: requests.Response) -> Mapping[str, object]:
        try:
            document: Any = answer.json()
        except requests.JSONDecodeError as error:
            raise self._failed(f"{path} answered no JSON: {answer.text[:200]}") from error
        if not isinstance(document, dict):
            raise self._failed(f"{path} answered no JSON object: {answer.text[:200]}")
        return document

    def _failed(self, message: str) -> ServerFailed:
        return ServerFailed(f"{self.url}: {message}", self._log_path)


def _whole(load: object, key: str) -> int:
    value = load.get(key) if isinstance(load, Mapping) else None
    return value if isinstance(value, int) else 0


def _reason(error: requests.RequestException) -> str:
    """The innermost cause; the outer layers repeat it with addresses of objects."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return str(cause) or type(cause).__name__
