"""What a prefix cache can serve of one phase's prompts from those of all phases before it."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runner.load.vocabulary import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID
from runner.load.workload import RequestSource
from runner.plans import trial_seed
from runner.trial import Lengths, LoadPlan, LoadProtocol

TOKENS = HIGHEST_TOKEN_ID - LOWEST_TOKEN_ID + 1
PHASES = ("warmup", *(f"rung-{rung}-{restart}" for rung in range(3) for restart in range(3)))
REQUESTS = 60


def own_prompts(study_seed: int, trial: int, phase: str, shared: float) -> list[tuple[int, ...]]:
    """What follows the shared prefix in each prompt of a phase, up to its third token."""
    plan = LoadPlan(
        phase=phase,
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=8,
        prompt_tokens=Lengths("uniform", 16, 64),
        output_tokens=Lengths.fixed(1),
        seed=trial_seed(study_seed, trial),
        shared_prefix=shared,
    )
    source = RequestSource(plan)
    requests = [source.next() for _ in range(REQUESTS)]
    return [tuple(source.input_ids(r)[r.shared_tokens :][:3]) for r in requests]


def phases_of(study_seed: int, shared: float) -> Iterator[list[tuple[int, ...]]]:
    for trial in range(3):
        for phase in PHASES:
            yield own_prompts(study_seed, trial, phase, shared)


@hypothesis_settings(max_examples=15, deadline=None, derandomize=True)
@given(study_seed=st.integers(0, 2**32 - 1), shared=st.sampled_from([0.0, 0.5]))
def test_phases_share_no_beginning_but_single_tokens_by_chance(
    study_seed: int, shared: float
) -> None:
    """A cache of page size 1 that forgets nothing: it serves what is at the beginning of both."""
    firsts: set[int] = set()
    pairs: set[tuple[int, ...]] = set()
    triples: set[tuple[int, ...]] = set()
    served, longer, expected, cached = 0, 0, 0.0, 0
    for prompts in phases_of(study_seed, shared):
        assert len({prompt[0] for prompt in prompts}) == REQUESTS, "within a phase all differ"
        served += sum(prompt[0] in firsts for prompt in prompts)
        longer += len(pairs & {prompt[:2] for prompt in prompts})
        assert not triples & set(prompts)
        expected += len(prompts) * cached / TOKENS
        cached += len(prompts)
        firsts |= {prompt[0] for prompt in prompts}
        pairs |= {prompt[:2] for prompt in prompts}
        triples |= set(prompts)
    assert longer <= 1, "0.002 are expected"
    # About N / V tokens a prompt, as the module says: five standard deviations of counts.
    assert abs(served - expected) < 5 * expected**0.5


@hypothesis_settings(max_examples=15, deadline=None, derandomize=True)
@given(study_seed=st.integers(0, 2**32 - 1))
def test_no_two_phases_walk_the_same_way(study_seed: int) -> None:
    """Two phases that share a first token do not go on to share the next ones.

    Steps whose ratio is that of small numbers, as 3 to 5, meet now and then; equal ones always.
    """
    phases = [[prompt[0] for prompt in prompts] for prompts in phases_of(study_seed, 0.0)]
    for place, one in enumerate(phases):
        for other in phases[:place]:
            assert len(set(one) & set(other)) <= len(one) // 2, "0.12 are expected of 60 and 60"


def test_a_phase_goes_through_all_tokens_before_it_meets_one_again() -> None:
    plan = LoadPlan("rung-0", LoadProtocol.CLOSED_LOOP, 1, Lengths.fixed(1), Lengths.fixed(1), 7)
    source = RequestSource(plan)
    firsts = {source.input_ids(source.next())[0] for _ in range(TOKENS)}
    assert firsts == set(range(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID + 1))
