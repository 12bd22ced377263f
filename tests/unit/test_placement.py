"""GPUs are dealt in contiguous, disjoint runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cluster.placement import assign_gpus
from runner.errors import ConfigError
from runner.trial import LaunchSpec


def launch(replicas: int, size: int) -> LaunchSpec:
    return LaunchSpec(1, "key", {}, replicas, size)


def test_four_servers_of_two_gpus() -> None:
    assert assign_gpus(launch(4, 2), tuple(range(8))) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_gpus_keep_the_numbers_of_the_node() -> None:
    assert assign_gpus(launch(1, 2), (4, 6)) == ((4, 6),)


def test_too_few_gpus_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs 8 GPUs \(2 servers of 4\), 6 are there"):
        assign_gpus(launch(2, 4), tuple(range(6)))


@given(st.integers(1, 8), st.integers(1, 8))
def test_no_gpu_is_shared(replicas: int, size: int) -> None:
    placed = assign_gpus(launch(replicas, size), tuple(range(64)))

    used = [gpu for gpus in placed for gpu in gpus]
    assert len(placed) == replicas
    assert all(len(gpus) == size for gpus in placed)
    assert len(used) == len(set(used))
