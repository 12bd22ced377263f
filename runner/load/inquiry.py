"""What a running server says of itself, asked before it is loaded: is it there, what does it serve.

A server that serves none of these paths is loaded all the same; one that cannot be reached, or
refuses who asks, is not.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass, field

from runner.errors import LoadFailed
from runner.load.client import Address, Target, tls_context

ANSWER_DEADLINE_S = 5.0
MOST_BYTES = 50_000_000
REFUSED = (401, 403)
INFO_PATHS = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
# An answer may hold secrets, such as the server's own key: only these are taken.
INFO_KEYS = (
    "model_path",
    "served_model_name",
    "version",
    *("tp_size", "pp_size", "dp_size", "max_running_requests"),
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Who answers: the name its model is asked for by (None: unknown), and what else it tells."""

    model: str | None
    facts: dict[str, object] = field(default_factory=dict)


def ask_server(target: Target) -> ServerFacts:
    """Ask a server what it is; raises LoadFailed when it cannot be reached or refuses us."""
    check_reachable(target)
    model: object = None
    facts: dict[str, object] = {}
    try:
        listed = _get(target, "/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        model = first.get("id") if isinstance(first, dict) else None
        for path in INFO_PATHS:
            answer = _get(target, path)
            facts |= {key: answer[key] for key in INFO_KEYS if answer.get(key) is not None}
            if "model_path" in facts:
                break
    except (OSError, http.client.HTTPException):
        pass  # the load itself finds out what a server like this can do
    name = model or facts.get("served_model_name") or facts.get("model_path")
    return ServerFacts(name if isinstance(name, str) else None, facts)


def check_reachable(target: Target) -> None:
    """Raise LoadFailed unless a connection can be made, over TLS for https."""
    try:
        connection = _connection(Address.of(target.url))
        connection.connect()
        connection.close()
    except ssl.SSLCertVerificationError as err:
        raise LoadFailed(
            f"the certificate of {target.url} is not trusted here: {err.verify_message}; set "
            "SSL_CERT_FILE to the certificate of the authority that signed it"
        ) from err
    except ssl.SSLError as err:
        raise LoadFailed(
            f"{target.url} does not speak TLS ({err.reason}); write http:// if it is a plain server"
        ) from err
    except socket.gaierror as err:
        raise LoadFailed(f"cannot connect to {target.url}: no such host ({err.strerror})") from err
    except (OSError, UnicodeError) as err:
        raise LoadFailed(
            f"cannot connect to {target.url}: {err}; start the server, or correct the address"
        ) from err


def refusal_advice(target: Target, status: int) -> str:
    """What a server's 401 or 403 means to the user."""
    what = "the key it was shown" if target.key else "requests without a key"
    return (
        f"{target.url} refuses {what} (HTTP {status}); name the environment variable that holds "
        "its key with --api-key-env"
    )


def _connection(address: Address) -> http.client.HTTPConnection:
    if address.is_secure:
        return http.client.HTTPSConnection(
            address.host, address.port, timeout=ANSWER_DEADLINE_S, context=tls_context()
        )
    return http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_DEADLINE_S)


def _get(target: Target, path: str) -> dict[str, object]:
    """The JSON object at a path, empty if there is none; raises OSError and HTTPException."""
    address = Address.of(target.url)
    connection = _connection(address)
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    try:
        connection.request("GET", address.prefix + path, headers=headers)
        answer = connection.getresponse()
        content = answer.read(MOST_BYTES)
    finally:
        connection.close()
    if answer.status in REFUSED:
        raise LoadFailed(refusal_advice(target, answer.status))
    try:
        found = json.loads(content) if answer.status == http.client.OK else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
