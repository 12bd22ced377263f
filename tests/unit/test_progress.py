from __future__ import annotations

from dataclasses import replace

from runner.insight.progress import Progress, progress_of
from runner.insight.summary import count_words
from runner.trial import Outcome
from tests.samples import make_result, make_settings

STUDY = replace(make_settings(), search=replace(make_settings().search, trials=4))
SEARCHED = [
    make_result(0, 90.0, name="pp8-auto"),
    make_result(1, 100.0),
    make_result(2, None, outcome=Outcome.PRUNED),
    make_result(3, None),
    make_result(4, 80.0),
]


def test_while_the_search_goes_on_the_most_is_expected_of_re_measurements() -> None:
    progress = progress_of(SEARCHED[:3], STUDY)
    assert progress == Progress(done=3, wanted=4, is_repeating=False, again_done=0, again_wanted=4)
    assert (progress.measured, progress.left) == (3, 1 + 4)
    assert progress.words == "3 of 4 trials done"


def test_after_the_search_the_finalists_and_the_baselines_are_measured_again() -> None:
    """Three complete ones: all are finalists, the baseline too."""
    first, bad = make_result(5, 99.0, repeat_of=1), make_result(6, None, repeat_of=0)
    progress = progress_of([*SEARCHED, first, bad], STUDY)
    assert progress.words == "4 of 4 trials done, 1 of 3 measured again"  # #6 is tried again
    retried = make_result(7, 91.0, repeat_of=0, retry_of=6)
    progress = progress_of([*SEARCHED, first, bad, retried], STUDY)
    assert progress == Progress(done=4, wanted=4, is_repeating=True, again_done=2, again_wanted=3)
    assert progress.left == 1
    assert progress.words == "4 of 4 trials done, 2 of 3 measured again"


def test_a_space_that_ended_early_is_not_waited_for() -> None:
    progress = progress_of([make_result(0, 90.0), make_result(1, 91.0, repeat_of=0)], STUDY)
    assert progress.left == 0
    assert progress.words == "1 of 4 trials done, 1 of 1 measured again"


def test_a_study_without_re_measurements_says_nothing_of_them() -> None:
    none = replace(STUDY, measure=replace(STUDY.measure, finalists=0))
    unnamed = [replace(result, name=None) for result in SEARCHED]
    assert progress_of(unnamed, none).words == "4 of 4 trials done"


def test_a_study_that_is_to_have_fewer_trials_than_it_has_counts_those() -> None:
    fewer = replace(STUDY, search=replace(STUDY.search, trials=2))
    assert progress_of(SEARCHED, fewer).words.startswith("4 of 4 trials done")
    assert count_words(SEARCHED, fewer).startswith("4 of 4 trials: ")


def test_a_study_that_is_extended_after_its_re_measurements_searches_on() -> None:
    extended = replace(STUDY, search=replace(STUDY.search, trials=6))
    again = [make_result(5, 99.0, repeat_of=1), make_result(6, 90.0, repeat_of=0)]
    progress = progress_of([*SEARCHED, *again, make_result(7, 101.0)], extended)
    assert progress.is_searching
    assert progress.left == 1 + 4 - 2
    assert progress.words == "5 of 6 trials done, 2 of 4 measured again"
