"""Which phases of load measure a trial, and in which order."""

from runner.plans import lengths_of, rung_plans, trial_seed, warmup_plan
from runner.trial import Lengths, LoadProtocol, TrialLengths
from tests.studies import DEMO, study


def ladder(**sections: object) -> list[int]:
    return [plan.concurrency for plan in rung_plans(study(**sections), 0)]


def test_the_objective_is_measured_first_then_from_the_top() -> None:
    objective = [{"metric": "ttft_s.p99", "concurrency": 8, "direction": "minimize"}]

    assert ladder() == [32, 8, 1]
    assert ladder(objectives=objective) == [8, 32, 1]


def test_phases_of_all_trials_see_different_prompts() -> None:
    plans = [
        plan
        for number in range(3)
        for plan in (warmup_plan(study(), number), *rung_plans(study(), number))
    ]

    assert len({(plan.seed, plan.phase) for plan in plans}) == 12


def test_seeds_depend_on_study_and_trial_alone() -> None:
    assert trial_seed(0, 7) == trial_seed(0, 7)
    assert len({trial_seed(study_seed, number) for study_seed in (0, 1) for number in (0, 1)}) == 4


def test_a_warm_up_loads_the_highest_rung() -> None:
    warmup = warmup_plan(study(), 0)

    assert (warmup.concurrency, warmup.is_warmup) == (32, True)


def test_open_loop_measures_rates() -> None:
    workload = {**DEMO["workload"], "protocol": "open_loop", "rate": [0.5, 2.0]}
    workload.pop("concurrency")

    plans = rung_plans(study(workload=workload), 0)

    assert [(plan.rate, plan.protocol) for plan in plans] == [
        (2.0, LoadProtocol.OPEN_LOOP),
        (0.5, LoadProtocol.OPEN_LOOP),
    ]


def test_re_measurements_have_the_lengths_of_the_workload() -> None:
    settings = study(workload={**DEMO["workload"], "output_tokens": {"uniform": [1000, 3000]}})

    assert lengths_of(settings, None) is TrialLengths.SEARCH
    assert lengths_of(settings, 3) is TrialLengths.WORKLOAD
    for lengths, law in (
        (TrialLengths.SEARCH, Lengths("uniform", 128, 384)),
        (TrialLengths.WORKLOAD, Lengths("uniform", 1000, 3000)),
    ):
        plans = (warmup_plan(settings, 9, lengths), *rung_plans(settings, 9, lengths))
        assert {plan.output_tokens for plan in plans} == {law}


def test_with_one_law_or_nothing_to_confirm_all_trials_are_alike() -> None:
    long = {**DEMO["workload"], "output_tokens": 1000}
    none = {**DEMO["measure"], "finalists": 0}

    assert lengths_of(study(), 3) is TrialLengths.SEARCH
    assert lengths_of(study(workload=long, measure=none), 3) is TrialLengths.SEARCH
    assert rung_plans(study(), 3, TrialLengths.WORKLOAD) == rung_plans(study(), 3)
