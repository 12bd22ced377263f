"""What SGLang compiles at run time, kept from one server to the next.

One folder per SGLang version, GPU model and driver: what one of them compiled may crash another.
Whoever starts servers holds the folder's lock, shared, and so does each server as long as it
lives, its driver's death notwithstanding. Locks that a killed compiler left behind make the next
one wait for ever; they are removed while nobody holds the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner.engines.sglang.process import cache_home
from runner.errors import StudyError

CACHE_VARIABLE = "SGLANG_CACHE_DIR"
REDIRECTED: Mapping[str, str] = {
    # What new versions of SGLang put below SGLANG_CACHE_DIR by themselves, old ones do not.
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
USE_LOCK = ".in-use"
STALE_NAMES = ("lock", ".ninja_lock")  # torch's extension builder, ninja
STALE_SUFFIX = ".lock"

_DRIVER_VERSION = Path("/sys/module/nvidia/version")


def driver_version() -> str:
    """NVIDIA's driver as the kernel has it loaded."""
    try:
        return _DRIVER_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def cache_folder(
    version: str, gpu_model: str, driver: str, environment: Mapping[str, str]
) -> Path | None:
    """Where servers keep what they compile; None where the user has said where: SGLANG_CACHE_DIR.

    `environment` is that of the servers.
    """
    if environment.get(CACHE_VARIABLE):
        return None
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{version}-{gpu_model}-{driver}").lstrip(".")
    return cache_home(environment) / "jit" / name


def cache_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that lead into the folder, but for those that are set already."""
    wanted = {
        CACHE_VARIABLE: str(folder),
        **{name: str(folder / below) for name, below in REDIRECTED.items()},
    }
    return {name: value for name, value in wanted.items() if not environment.get(name)}


@contextmanager
def hold_cache(folder: Path) -> Iterator[int]:
    """Make the folder and hold it; yields the descriptor that servers are to inherit.

    Stale locks are removed first where no server uses the folder. Raises StudyError when it
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / USE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StudyError(
            f"{folder}, where servers keep what they compile, cannot be used: {error.strerror}; "
            f"set XDG_CACHE_HOME, or {CACHE_VARIABLE} in engine.env"
        ) from error
    try:
        if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            remove_stale_locks(folder)
        _lock(descriptor, fcntl.LOCK_SH)  # waits only for another one's cleaning
        yield descriptor
    finally:
        os.close(descriptor)


def remove_stale_locks(folder: Path) -> tuple[Path, ...]:
    """Remove lock files below the folder, following no links; returns what was removed."""
    removed: list[Path] = []
    for place, _, names in os.walk(folder):
        for name in names:
            if name in STALE_NAMES or name.endswith(STALE_SUFFIX):
                path = Path(place, name)
                path.unlink(missing_ok=True)
                removed.append(path)
    return tuple(removed)


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True
