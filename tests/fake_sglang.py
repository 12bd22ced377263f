"""A small stand-in for an SGLang server: the same flags, HTTP and deaths, and nothing behind them.

Run as a program; `--fake KEY=VALUE` makes it misbehave:
    log=FILE exit=N    write FILE to the log, then exit with code N (-9: kill itself)
    delay=SECONDS      open the port that late
    hang=1             never open the port
    stall=FILE         write FILE to the log, then nothing more; never open the port
    busy=cpu|read      while it stalls, compute, or read from a disk
    bark=FILE          as SGLang's watchdog: FILE goes to the log line by line, then exit -9
    sick=1             /health answers 503 for ever
    mute=1             /generate is accepted and never answered
    strict=1           /generate refuses to tell log-probabilities
    curt=1             /generate answers greedy requests with a token less
    ghosts=N           N requests survive, one is given up at each /flush_cache
    deaf=1             the cap is never changed
    keeper=1           a wrapper runs the server, and starts it again when it dies
    stubborn=1         SIGTERM is ignored, by a child process as well
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SWITCHES = ("--enable-metrics",)


def say(text: str) -> None:
    sys.stderr.write(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text + "\n")


def read_flags(argv: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    flags: dict[str, str] = {}
    fake: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if word == "--fake":
            key, _, value = next(words).partition("=")
            fake[key] = value
        elif word in SWITCHES:
            flags[word] = ""
        else:
            flags[word.removeprefix("--").replace("-", "_")] = next(words)
    return flags, fake


def die(path: str, code: int) -> None:
    sys.stderr.write(Path(path).read_text(encoding="utf-8"))
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def bark(path: str) -> None:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        sys.stderr.write(line + "\n")
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def stall(path: str, busy: str) -> None:
    sys.stderr.write(Path(path).read_text(encoding="utf-8"))
    while True:
        if busy == "read":
            Path(sys.executable).resolve().read_bytes()
        elif not busy:
            time.sleep(1)


class FakeSglang:
    def __init__(self, flags: dict[str, str], fake: dict[str, str]) -> None:
        self.flags = flags
        self.fake = fake
        self.pp_size = int(flags.get("pp_size", 1))
        self.max_running = int(flags.get("max_running_requests", 16))
        self.limit = self.max_running // self.pp_size
        self.cap = int(flags.get("pp_max_micro_batch_size", self.limit))
        self.ghosts = int(fake.get("ghosts", 0))

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        match path:
            case "/health":
                return (503 if "sick" in self.fake else 200), {}
            case "/server_info":
                return 200, self.info()
            case "/generate":
                return self.generate(body)
            case "/set_internal_state":
                asked = body["server_args"]["pp_max_micro_batch_size"]
                if 1 <= asked <= self.limit and "deaf" not in self.fake:
                    self.cap = asked
                return 200, [True]
            case "/flush_cache":
                self.ghosts, before = max(0, self.ghosts - 1), self.ghosts
                return (400 if before else 200), {}
            case "/v1/loads":
                return 200, {"loads": [{"num_waiting_reqs": 0, "num_running_reqs": 0}]}
            case "/abort_request":
                say("abort_all" if body == {"abort_all": True} else "abort of nothing")
                return 200, {}
            case _:
                return 404, {"detail": "Not Found"}

    def generate(self, body: dict[str, Any]) -> tuple[int, object]:
        while "mute" in self.fake:
            time.sleep(1)
        if "strict" in self.fake and "return_logprob" in body:
            return 400, {"error": {"message": "return_logprob is not supported"}}
        wanted = body["sampling_params"]["max_new_tokens"]
        ids = [body["input_ids"][0]] * (wanted - ("curt" in self.fake and wanted > 1))
        return 200, {"output_ids": ids, "meta_info": {"completion_tokens": wanted}}

    def info(self) -> dict[str, object]:
        return {
            "port": int(self.flags["port"]),
            "nccl_port": int(self.flags["nccl_port"]),
            "pp_size": self.pp_size,
            "tp_size": 1,
            "cuda_devices": os.environ["CUDA_VISIBLE_DEVICES"],
            "environment": sorted(os.environ),
            "device_order": os.environ["CUDA_DEVICE_ORDER"],
            "base_gpu_id": int(self.flags["base_gpu_id"]),
            "internal_states": [
                {
                    "pp_max_micro_batch_size": self.cap,
                    "effective_max_running_requests_per_dp": self.max_running,
                }
            ],
        }


def serve(server: FakeSglang) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}") or {}
            status, answer = server.answer(self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            return

    class Listener(ThreadingHTTPServer):
        allow_reuse_address = "kept" in server.fake
        daemon_threads = True
        request_queue_size = 64

    port = int(server.flags["port"])
    try:
        listener = Listener((server.flags["host"], port), Handler)
    except OSError as error:
        say(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
            f"('127.0.0.1', {port}): address already in use"
        )
        sys.exit(1)
    say(f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)")
    if "bark" in server.fake:
        threading.Thread(target=bark, args=(server.fake["bark"],), daemon=True).start()
    if "sick" not in server.fake:
        say("The server is fired up and ready to roll!")
    listener.serve_forever()


def main() -> None:
    flags, fake = read_flags(sys.argv[1:])
    while "keeper" in fake:
        words = ["kept=1" if word == "keeper=1" else word for word in sys.argv]
        subprocess.run([sys.executable, *words], check=False)
    if "stubborn" in fake:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
    say("Init parallel begin.")
    if "log" in fake:
        die(fake["log"], int(fake["exit"]))
    time.sleep(float(fake.get("delay", "0.1")))
    if "stall" in fake:
        stall(fake["stall"], fake.get("busy", ""))
    while "hang" in fake:
        time.sleep(1)
    say("Load weight begin. avail mem=1.00 GB")
    say("Load weight end. elapsed=0.01 s, avail mem=1.00 GB")
    serve(FakeSglang(flags, fake))


if __name__ == "__main__":
    main()
