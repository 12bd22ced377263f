"""The HTTP side: routes that look, routes that control, and the access log."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from runner.engines.emulator.generation import (
    Generation,
    error_words,
    json_response,
    openai_error,
    read_object,
)
from runner.engines.emulator.info import model_card, model_info, models, server_info
from runner.engines.emulator.loads import SECTIONS, loads, loads_text
from runner.engines.emulator.server import EmulatedServer, RequestRefused, Status
from runner.engines.emulator.stats import render

MAX_BODY_BYTES = 256 * 1024**2
FLUSH_POLL_S = 0.1
ADMIN_PATHS = {
    *("/set_internal_state", "/flush_cache", "/abort_request", "/freeze_gc"),
    *("/pause_generation", "/continue_generation"),
}
LIVE_NUMBERS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(servers: Sequence[EmulatedServer]) -> web.Application:
    """All routes of one port; behind it are one server or several replicas."""
    server = servers[0]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guard(server)])
    generation, control = Generation(servers), Control(servers)
    for method in ("POST", "PUT"):
        app.router.add_route(method, "/generate", generation.generate)
        app.router.add_route(method, "/set_internal_state", control.set_internal_state)
    app.router.add_post("/v1/completions", generation.complete)
    app.router.add_post("/v1/chat/completions", generation.chat)
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, control.health)
    app.router.add_get("/", control.root)
    app.router.add_get("/ready", control.ready)
    app.router.add_get("/ping", control.ping)
    app.router.add_get("/model_info", control.model_info)
    app.router.add_get("/server_info", control.server_info)
    for name, handler in (
        ("model_info", control.model_info),
        ("server_info", control.server_info),
    ):
        app.router.add_get(f"/get_{name}", _deprecated(server, name, handler))
    app.router.add_get("/v1/models", control.models)
    app.router.add_get("/v1/models/{model:.+}", control.model)
    app.router.add_get("/v1/loads", control.loads)
    for method in ("GET", "POST"):
        app.router.add_route(method, "/flush_cache", control.flush_cache)
        app.router.add_route(method, "/freeze_gc", control.freeze_gc)
    app.router.add_post("/abort_request", control.abort_request)
    app.router.add_post("/pause_generation", control.pause)
    app.router.add_post("/continue_generation", control.resume)
    if server.setup.args["enable_metrics"]:
        app.router.add_get("/metrics", control.metrics)
    app.on_response_prepare.append(_access_log(server))
    return app


class Control:
    """The routes that do not generate."""

    def __init__(self, servers: Sequence[EmulatedServer]) -> None:
        self._servers = servers
        self._server = servers[0]

    async def health(self, _: web.Request) -> web.Response:
        """200 once a real token came out."""
        return web.Response(status=200 if await self._server.is_healthy() else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """200 while the server takes requests; costs nothing."""
        return web.Response(status=200 if self._server.is_ready else 503)

    async def ping(self, _: web.Request) -> web.Response:
        """As `ready`, but a pause does not count."""
        return web.Response(status=200 if self._server.status is Status.UP else 503)

    async def root(self, _: web.Request) -> web.Response:
        return json_response("SGLang is running")

    async def model_info(self, _: web.Request) -> web.Response:
        return json_response(model_info(self._server))

    async def server_info(self, _: web.Request) -> web.Response:
        return json_response(server_info(self._servers))

    async def models(self, _: web.Request) -> web.Response:
        return json_response(models(self._server))

    async def model(self, request: web.Request) -> web.Response:
        """The one model, under its own name only."""
        name = request.match_info["model"]
        if name == self._server.setup.model_name:
            return json_response(model_card(self._server))
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, 404)

    async def loads(self, request: web.Request) -> web.Response:
        """`include` picks sections, `dp_rank` a replica, `format=prometheus` another format."""
        query = request.query
        include = query.get("include")
        sections = {name.strip() for name in include.split(",")} if include else {"all"}
        if not sections <= SECTIONS.keys() | {"core", "all"}:
            return web.Response(status=500, text="Internal Server Error")
        try:
            rank = int(query["dp_rank"]) if "dp_rank" in query else None
        except ValueError:
            return openai_error(RequestRefused("dp_rank must be a whole number."))
        answer = loads(self._servers, sections, rank)
        if query.get("format") == "prometheus":
            return web.Response(text=loads_text(answer), content_type="text/plain")
        return json_response(answer)

    async def set_internal_state(self, request: web.Request) -> web.Response:
        """All or nothing; 200 with a boolean for each replica, also when refused."""
        try:
            values = (await read_object(request)).get("server_args")
        except RequestRefused as err:
            return openai_error(err)
        if not isinstance(values, dict):
            return openai_error(RequestRefused("server_args must be an object."))
        return json_response([self._set(server, values) for server in self._servers])

    async def pause(self, request: web.Request) -> web.Response:
        """Mode abort, SGLang's default: what runs is aborted, what comes waits."""
        try:
            mode = (await read_object(request)).get("mode", "abort")
        except RequestRefused as err:
            return openai_error(err)
        if mode != "abort":
            return openai_error(RequestRefused(f"mode {mode!r} is not emulated; use 'abort'."))
        for server in self._servers:
            server.pause()
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        for server in self._servers:
            server.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """400 unless idle; `timeout` seconds are given to become so."""
        try:
            timeout_s = float(request.query.get("timeout", "0"))
        except ValueError:
            return openai_error(RequestRefused("timeout must be a number of seconds."))
        clock = self._server.clock
        deadline_s = clock.now_s() + timeout_s
        is_flushed = self._flush()
        while not is_flushed and clock.now_s() < deadline_s:
            await asyncio.sleep(clock.wall_duration_s(FLUSH_POLL_S))
            is_flushed = self._flush()
        text = FLUSHED if is_flushed else "Flush cache failed: the server is not idle.\n"
        return web.Response(text=text, status=200 if is_flushed else 400)

    async def abort_request(self, request: web.Request) -> web.Response:
        """Always 200, whether anything was aborted or not."""
        try:
            body = await read_object(request)
        except RequestRefused as err:
            return openai_error(err)
        request_id = body.get("rid")
        is_all = body.get("abort_all") is True
        for server in self._servers:
            if is_all:
                server.abort_all()
            elif isinstance(request_id, str) and request_id:
                server.abort(request_id)
        return web.Response(status=200)

    async def freeze_gc(self, _: web.Request) -> web.Response:
        for server in self._servers:
            server.freeze_gc()
        return web.Response(text="Garbage collection frozen.\n")

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        setup = self._server.setup
        replicas = [(server.stats, server.gauges()) for server in self._servers]
        text = render(replicas, setup.model_name, setup.shape.pp_size)
        return web.Response(text=text, content_type="text/plain")

    def _flush(self) -> bool:
        flushed = [server.flush() for server in self._servers]
        return all(flushed)

    def _set(self, server: EmulatedServer, values: dict[str, object]) -> bool:
        cap = values.get("pp_max_micro_batch_size")
        others = {name for name in values if name != "pp_max_micro_batch_size"}
        if not others <= set(LIVE_NUMBERS):
            return False
        if cap is None:
            return True
        # SGLang takes 4.5 too; nobody should send that.
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not math.isfinite(cap):
            return False
        return server.set_cap(int(cap))


def _deprecated(server: EmulatedServer, name: str, handler: Handler) -> Handler:
    """An old path: it answers, and says in the log that it is old."""

    async def warn(request: web.Request) -> web.StreamResponse:
        server.log.write(
            f"Endpoint '/get_{name}' is deprecated and will be removed in a future version. "
            f"Please use '/{name}' instead."
        )
        return await handler(request)

    return warn


def _guard(server: EmulatedServer) -> Middleware:
    """Checks the API keys, and puts unknown routes in SGLang's words."""
    key, admin_key = server.setup.text("api_key"), server.setup.text("admin_api_key")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = (admin_key or key) if request.path in ADMIN_PATHS else key
        is_open = request.path.startswith(("/health", "/metrics", "/ready"))
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if wanted and not is_open and (scheme.lower() != "bearer" or token != wanted):
            return json_response({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except web.HTTPException as err:
            words = error_words(str(err.reason), str(err.status), err.status)
            return json_response(words, err.status)

    return guard


def _access_log(
    server: EmulatedServer,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def log(request: web.Request, response: web.StreamResponse) -> None:
        transport = request.transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        address = f"{peer[0]}:{peer[1]}" if peer else "-"
        server.log.write(
            f'INFO:     {address} - "{request.method} {request.path_qs} HTTP/1.1" '
            f"{response.status} {response.reason}"
        )

    return log
