"""Where servers keep what they compile, and stale locks in it: real files, real holders."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.engines.program import program_for, with_cache
from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.jit_cache import (
    REDIRECTED,
    USE_LOCK,
    cache_environment,
    cache_folder,
    hold_cache,
)
from runner.errors import StudyError
from runner.measure.power import GpuIdentity
from runner.settings import EngineSettings
from runner.trial import EngineKind
from tests.samples import make_settings

GPU = GpuIdentity(0, "GPU-a", "NVIDIA H200", 1 << 37, 700.0)
HOLDER = """
import sys
from pathlib import Path
from runner.engines.sglang.jit_cache import hold_cache
with hold_cache(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache in which a compiler was killed, and a neighbour that is none of ours."""
    folder = tmp_path / "jit" / "ours"
    for name in ("torch_extensions/op/lock", "torch_extensions/op/.ninja_lock", "inductor/a.lock"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / "torch_extensions" / "op" / "op.so").touch()
    (tmp_path / "jit" / "lock").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "their.lock").touch()
    (folder / "link").symlink_to(outside)
    (folder / "link.lock").symlink_to(outside / "their.lock")
    return folder


def locks_of(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*lock") if path.parent.name != "link"}


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the folder, begun before the locks of this test lay there."""
    kept = locks_of(folder)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        for name in kept - {"link.lock"}:
            (folder / name).touch()
        yield process
        process.kill()


def test_stale_locks_are_removed_inside_the_folder_only(folder: Path) -> None:
    with hold_cache(folder):
        assert locks_of(folder) == set()
    assert (folder / "torch_extensions" / "op" / "op.so").exists()
    assert (folder.parent / "lock").exists()
    assert (folder.parent.parent / "outside" / "their.lock").exists()


def test_locks_stay_while_another_process_uses_the_folder(
    folder: Path, holder: subprocess.Popen[str]
) -> None:
    with hold_cache(folder):
        assert locks_of(folder) == {"lock", ".ninja_lock", "a.lock"}
    holder.kill()
    holder.wait()
    with hold_cache(folder):
        assert locks_of(folder) == set()


def test_a_server_keeps_the_folder_when_its_driver_is_dead(folder: Path) -> None:
    with hold_cache(folder) as descriptor:
        server = subprocess.Popen(["sleep", "600"], pass_fds=(descriptor,))
    try:
        (folder / "lock").touch()
        with hold_cache(folder):
            assert (folder / "lock").exists()
    finally:
        server.kill()
        server.wait()
    with hold_cache(folder):
        assert not (folder / "lock").exists()


def test_servers_share_the_folder(folder: Path) -> None:
    with hold_cache(folder), hold_cache(folder):
        probe = os.open(folder / USE_LOCK, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(probe)


def test_a_folder_that_cannot_be_made_says_what_helps(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StudyError, match=r"set XDG_CACHE_HOME, or SGLANG_CACHE_DIR in engine.env"),
        hold_cache(tmp_path / "file" / "jit"),
    ):
        pytest.fail("it was held")


def test_there_is_one_folder_for_each_version_gpu_and_driver() -> None:
    home = {"XDG_CACHE_HOME": "/cache"}
    first = cache_folder("0.5.23", "NVIDIA H200", "570.86.15", home)
    assert first == Path("/cache/sglang-runner/jit/0.5.23-NVIDIA-H200-570.86.15")
    others = [
        cache_folder("0.5.12", "NVIDIA H200", "570.86.15", home),
        cache_folder("0.5.23", "NVIDIA B200", "570.86.15", home),
        cache_folder("0.5.23", "NVIDIA H200", "580.1", home),
    ]
    assert len({first, *others}) == 4
    assert cache_folder("1", "a/../b", "2", home) == Path("/cache/sglang-runner/jit/1-a-..-b-2")
    here = Path.home() / ".cache" / "sglang-runner" / "jit" / "1-a-2"
    assert cache_folder("1", "a", "2", {}) == here
    assert cache_folder("1", "a", "2", {"XDG_CACHE_HOME": "not/absolute"}) == here


def test_the_user_decides_where() -> None:
    assert cache_folder("1", "a", "2", {"SGLANG_CACHE_DIR": "/mine"}) is None
    folder = Path("/cache")
    wanted = cache_environment(folder, {"TRITON_CACHE_DIR": "/mine", "HOME": "/root"})
    assert wanted["SGLANG_CACHE_DIR"] == "/cache"
    assert "TRITON_CACHE_DIR" not in wanted
    assert set(wanted) == {"SGLANG_CACHE_DIR", *REDIRECTED} - {"TRITON_CACHE_DIR"}
    assert {Path(value).parent for name, value in wanted.items() if name in REDIRECTED} == {folder}


def test_a_program_of_sglang_gets_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = EngineSettings(EngineKind.SGLANG, None, 1.0, "/m", "python", {}, {})
    settings = make_settings(engine=engine)
    program = program_for(settings, tmp_path, ServerEnvironment("0.5.23", ()))
    folder = with_cache(program, settings, [GPU]).cache_folder
    assert folder is not None
    assert folder.parent == tmp_path / "sglang-runner" / "jit"
    assert folder.name.startswith("0.5.23-NVIDIA-H200-")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/mine")
    assert with_cache(program, settings, [GPU]).cache_folder is None
