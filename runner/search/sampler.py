"""The sampler's choice: which setting of the space to measure next.

Optuna's samplers work on a copy of the study in memory, made from the history of trials at every
ask. So a setting that is refused never becomes a trial, an ask is quick, and the same history
and seed give the same choice: nothing of a sampler has to survive a kill.

What the copy leaves out, and why:
- re-measurements: the same setting again would weigh twice;
- failed, invalid and lost trials, unless the setting was given up: that counts as infeasible;
- a baseline that is no point of the space: it has a parameter the space does not have, or lacks
  one (resolved to a value outside). TPE samples parameters jointly as long as every trial has
  either all of them or none, so one such gap would part depth from cap.

What it has more: the points refused in this ask, as infeasible. TPE goes where bad trials are
rare, and they are rarest where the constraints allow none; told what was refused, it needs a few
draws where it needed dozens (tests/contract/test_samplers.py bounds them).
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    NSGAIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from runner.errors import ConfigError
from runner.launch import plan_launch, settings_in_a_row, spec_hash
from runner.search.history import History, PastTrial
from runner.search.proposals import given_up
from runner.settings import Choices, FloatRange, IntRange, Parameter, StudySettings
from runner.space import canonical, is_active, satisfies
from runner.trial import Outcome, Params, ParamValue

MOST_DRAWS = 64
MOST_RANDOM_DRAWS = 500
MOST_DRAWS_ON_A_LAUNCH = 16
VIOLATED = {"feasible": 1.0}
SAMPLERS = ("auto", "tpe", "random", "qmc", "nsga2")


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting the sampler is content with, how many points it drew for it, and its notes."""

    params: Params
    drawn: int
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchThatIsUp:
    """Servers that run, and the parameters that are fixed as long as they do."""

    key: str
    fixed: Params

    def narrow(self, sampler: BaseSampler) -> BaseSampler:
        """The sampler, for the other parameters only."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return PartialFixedSampler(dict(self.fixed), sampler)

    def runs(self, settings: StudySettings, params: Params) -> bool:
        """Whether these servers are those of a setting."""
        return plan_launch(settings, params).key == self.key


def never(_params: Params) -> bool:
    """No setting is known not to run."""
    return False


def choose(
    settings: StudySettings,
    history: History,
    all_points: Callable[[], Sequence[Params] | None],
    is_refused: Callable[[Params], bool] = never,
) -> Choice | None:
    """The next setting to measure; None when nothing of the space is left.

    The sampler draws until a point is new, keeps the constraints and is not known not to run
    (`is_refused`), at first among those that run on the launch that is up. When it finds none,
    chance picks among the rest: `all_points` lists the space where it is small enough.
    """
    is_open = open_settings(settings, history, is_refused)
    launch = launch_that_is_up(settings, history)
    index = sum(trial.drawn > 0 and trial.retry_of is None for trial in history)
    copy = StudyCopy(settings, history)
    for drawn in range(MOST_DRAWS):
        if drawn == MOST_DRAWS_ON_A_LAUNCH:
            launch = None
        sampler = make_sampler(
            settings, copy.untried, draw_seed(settings.search.seed, index, drawn)
        )
        params = copy.draw(sampler if launch is None else launch.narrow(sampler))
        if is_open(params) and (launch is None or launch.runs(settings, params)):
            return Choice(params, drawn + 1, copy.notes())
        if launch is None:  # what a launch has no room for may be good elsewhere
            copy.refuse()
    points = all_points()
    if points is not None:
        left = [params for params in points if is_open(params)]
        seed = draw_seed(settings.search.seed, index, MOST_DRAWS)
        return Choice(random.Random(seed).choice(left), MOST_DRAWS) if left else None
    for drawn in range(MOST_DRAWS, MOST_DRAWS + MOST_RANDOM_DRAWS):
        seed = draw_seed(settings.search.seed, index, drawn)
        params = copy.draw(RandomSampler(seed=seed))
        if is_open(params):
            return Choice(params, MOST_DRAWS)
    return None


def open_settings(
    settings: StudySettings, history: History, is_refused: Callable[[Params], bool]
) -> Callable[[Params], bool]:
    """Whether a setting may become a trial: allowed, never asked, and its launch not refused.

    A launch that was refused once (out of memory, a backend that this GPU lacks) is refused for
    every setting that differs in live parameters alone.
    """
    known = known_settings(settings, history)
    refused = {
        plan_launch(settings, canonical(settings, trial.params)).key
        for trial in history
        if trial.refused_its_launch and satisfies(settings, canonical(settings, trial.params))
    }

    def is_open(params: Params) -> bool:
        if spec_hash(params) in known or not satisfies(settings, params):
            return False
        if refused and plan_launch(settings, params).key in refused:
            return False
        return not is_refused(params)

    return is_open


def launch_that_is_up(settings: StudySettings, history: History) -> LaunchThatIsUp | None:
    """The launch of the last trial, if others are to be measured on it; None: a free choice.

    It serves `settings_in_a_row` of them. Re-measurements in between do not count: a study whose
    budget is raised afterwards goes on as one that had it from the start.
    """
    most = settings_in_a_row(settings)
    last = [trial for trial in history if trial.is_search][-most:]
    if not last or not is_launched(last[-1]):
        return None
    plan = plan_launch(settings, last[-1].params)
    may_vary = any(
        parameter.name in plan.live_names and has_choice(parameter)
        for parameter in settings.parameters
    )
    if not may_vary or last[-1].found != last[-1].params:
        return None
    keys = [plan_launch(settings, trial.params).key for trial in last if is_launched(trial)]
    if keys.count(plan.key) == most:
        return None
    fixed = {name: value for name, value in last[-1].params.items() if name not in plan.live_names}
    return LaunchThatIsUp(plan.key, fixed)


def has_choice(parameter: Parameter) -> bool:
    """Whether a parameter can have more than one value."""
    if isinstance(parameter, Choices):
        return len(parameter.values) > 1
    return parameter.low < parameter.high


def is_launched(trial: PastTrial) -> bool:
    """Whether the servers of a trial were measured and lived on."""
    return trial.counts and trial.shares is None


def known_settings(settings: StudySettings, history: History) -> frozenset[str]:
    """Hashes of every setting that has a trial, and of what its baselines turned out to be."""
    asked = {spec_hash(canonical(settings, trial.params)) for trial in history}
    points = (trial for trial in history if is_point(settings, trial))
    return frozenset(asked | {spec_hash(trial.found) for trial in points})


def draw_seed(study_seed: int, index: int, drawn: int) -> int:
    """A seed of its own for each draw of each ask."""
    digest = hashlib.sha256(f"{study_seed}/{index}/{drawn}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def make_sampler(settings: StudySettings, untried: int, seed: int) -> BaseSampler:
    """The study's sampler. `untried` trials of the copy were never measured.

    TPE counts every trial as start-up; those that were never measured have shown it nothing, so
    they are added on top.
    """
    search = settings.search
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(``group``|QMCSampler)", ExperimentalWarning)
        match search.sampler:
            case "auto" | "tpe":
                return TPESampler(
                    multivariate=True,
                    group=True,
                    constant_liar=False,
                    n_startup_trials=max(2, min(10, search.trials // 3)) + untried,
                    seed=seed,
                )
            case "random":
                return RandomSampler(seed=seed)
            case "qmc":
                return QMCSampler(
                    scramble=True,
                    seed=search.seed,
                    independent_sampler=RandomSampler(seed=seed),
                    warn_independent_sampling=False,
                )
            case "nsga2":
                size = max(4, min(50, search.trials // 4))
                return NSGAIISampler(population_size=size, seed=seed)
            case unknown:
                raise ConfigError(
                    f"search.sampler is {unknown!r}; it can be one of: {', '.join(SAMPLERS)}"
                )


class StudyCopy:
    """The study as its sampler is to see it, in memory."""

    def __init__(self, settings: StudySettings, history: History) -> None:
        self._settings = settings
        self._storage = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(
            storage=self._storage,
            sampler=RandomSampler(seed=0),
            directions=directions(settings),
        )
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)
        self._drawn = self._study.ask()
        self._study.tell(self._drawn, state=TrialState.FAIL)
        self.untried = 0
        if settings.search.sampler == "qmc":
            self._study.add_trial(self._whole_space())
            self._skip_drawn(sum(trial.drawn for trial in history if trial.retry_of is None))
        else:
            self._remember(history)

    @property
    def study(self) -> optuna.Study:
        """The copy itself, for those who want to see what a sampler infers from it."""
        return self._study

    def draw(self, sampler: BaseSampler) -> Params:
        """One point of the space."""
        self._study.sampler = sampler
        self._drawn = self._study.ask()
        params: dict[str, ParamValue] = {}
        for parameter in self._settings.parameters:
            if is_active(parameter, params):
                params[parameter.name] = suggest(self._drawn, parameter)
        return params

    def notes(self) -> dict[str, object]:
        """What the sampler noted on the last draw."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(
            self._study_id, self._drawn.number
        )
        return dict(self._storage.get_trial_system_attrs(trial_id))

    def refuse(self) -> None:
        """Tell the sampler that the last draw is no good."""
        for name, excess in VIOLATED.items():
            self._drawn.set_constraint(name, excess)
        self._study.tell(self._drawn, state=TrialState.PRUNED)
        self.untried += 1

    def _remember(self, history: History) -> None:
        hopeless = given_up(history)
        for trial in history:
            is_hopeless = trial.number in hopeless or trial.outcome is Outcome.INFEASIBLE
            if not trial.is_search or not (trial.counts or is_hopeless):
                continue
            if not is_point(self._settings, trial):
                continue
            self.untried += is_hopeless
            constraints = VIOLATED if is_hopeless else trial.constraints
            self._study.add_trial(self._frozen(trial, constraints))

    def _frozen(self, trial: PastTrial, constraints: Mapping[str, float]) -> FrozenTrial:
        is_complete = trial.outcome is Outcome.COMPLETE
        return optuna.create_trial(
            state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
            values=list(trial.values) if is_complete else None,
            params=dict(trial.found),
            distributions=distributions(self._settings.parameters, trial.found),
            system_attrs=dict(trial.notes),
            intermediate_values=dict(trial.reported),
            constraints=dict(constraints),
        )

    def _whole_space(self) -> FrozenTrial:
        """A trial with every parameter: a low-discrepancy sequence needs all its dimensions."""
        params = {parameter.name: any_value(parameter) for parameter in self._settings.parameters}
        return optuna.create_trial(
            values=[0.0] * len(self._settings.objectives),
            params=params,
            distributions=distributions(self._settings.parameters, params),
        )

    def _skip_drawn(self, drawn: int) -> None:
        """Go on in the sequence where the last ask ended; its place is an attribute of a study."""
        if drawn:
            self.draw(make_sampler(self._settings, self.untried, seed=0))
            for key in self._storage.get_study_system_attrs(self._study_id):
                self._storage.set_study_system_attr(self._study_id, key, drawn - 1)


def directions(settings: StudySettings) -> list[StudyDirection]:
    """Which way each objective is better, in Optuna's words."""
    return [StudyDirection[objective.direction.name] for objective in settings.objectives]


def suggest(trial: optuna.Trial, parameter: Parameter) -> ParamValue:
    """Let the sampler choose one parameter."""
    match parameter:
        case Choices(name, values):
            return cast("ParamValue", trial.suggest_categorical(name, values))  # never None
        case IntRange(name, low, high, step, log):
            return trial.suggest_int(name, low, high, step=step, log=log)
        case FloatRange(name, low, high, log):
            return trial.suggest_float(name, low, high, log=log)


def distribution(parameter: Parameter) -> BaseDistribution:
    """A parameter in Optuna's words."""
    match parameter:
        case Choices(values=values):
            return CategoricalDistribution(values)
        case IntRange(low=low, high=high, step=step, log=log):
            return IntDistribution(low, high, log=log, step=step)
        case FloatRange(low=low, high=high, log=log):
            return FloatDistribution(low, high, log=log)


def distributions(parameters: Sequence[Parameter], params: Params) -> dict[str, BaseDistribution]:
    """The distributions of those parameters that `params` has."""
    return {p.name: distribution(p) for p in parameters if p.name in params}


def contains(parameter: Parameter, value: ParamValue) -> bool:
    """Whether a value lies inside the space; True is not 1 here."""
    match parameter:
        case Choices(values=values):
            return any(value == each and type(value) is type(each) for each in values)
        case IntRange(low=low, high=high, step=step):
            if isinstance(value, bool) or not isinstance(value, int):
                return False
            return low <= value <= high and (value - low) % step == 0
        case FloatRange(low=low, high=high):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            return low <= value <= high


def any_value(parameter: Parameter) -> ParamValue:
    """Some value of the parameter."""
    return parameter.values[0] if isinstance(parameter, Choices) else parameter.low


def inside(parameters: Sequence[Parameter], values: Params) -> dict[str, ParamValue]:
    """Those values that are active parameters of the space and lie in it."""
    return {
        p.name: values[p.name]
        for p in parameters
        if p.name in values and is_active(p, values) and contains(p, values[p.name])
    }


def is_point(settings: StudySettings, trial: PastTrial) -> bool:
    """Whether a trial measured exactly one point of the space, and Optuna knows which."""
    names = {parameter.name for parameter in settings.parameters}
    active = (p.name for p in settings.parameters if is_active(p, trial.found))
    return trial.params.keys() <= names and all(name in trial.found for name in active)
