from __future__ import annotations

from typing import Any

import pytest

from runner.config import parse_study
from runner.errors import ConfigError
from tests.study_samples import DOCUMENT, refused

YES = " (YAML reads yes, no, on and off as true and false)"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "engine.knd=sglang",
            (
                "unknown key 'knd'; did you mean 'kind'? "
                "Valid: kind, profile, time_scale, model, python, args, env"
            ),
        ),
        (
            "serch.trials=5",
            (
                "serch: unknown key 'serch'; did you mean 'search'? Valid: name, engine, hardware, "
                "parameters, constraints, baselines, workload, objectives, slo, search, measure, "
                "storage, tracking"
            ),
        ),
        ("tracking.xyz=5", "unknown key 'xyz'; valid: uri"),
        # Structured output makes the ranks of a pipeline diverge: there is no way to ask for it.
        (
            "workload.json_schema={}",
            (
                "unknown key 'json_schema'; valid: protocol, prompt_tokens, output_tokens, "
                "concurrency, rate, arrivals, shared_prefix"
            ),
        ),
        (
            "parameters.tp_size.choice=[1]",
            (
                "unknown key 'choice'; did you mean 'choices'? "
                "Valid: choices, int, float, step, log, when"
            ),
        ),
        (
            "workload.prompt_tokens={unifrm: [1, 5]}",
            (
                "workload.prompt_tokens.unifrm: unknown key 'unifrm'; did you mean 'uniform'? "
                "Valid: fixed, uniform, normal, file, recorded, paired"
            ),
        ),
    ],
)
def test_an_unknown_key(option: str, message: str) -> None:
    assert refused(option) == message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("engine.kind=sglng", "found the text 'sglng', expected simulated, emulated or sglang"),
        ("search.trials=ten", "found the text 'ten', expected a whole number, 1 or more"),
        ("search.trials=20.0", "found 20.0, expected a whole number, 1 or more"),
        ("search.trials=yes", f"found true, expected a whole number, 1 or more{YES}"),
        ("search.trials=0", "found 0, expected a whole number, 1 or more"),
        ("search.trials=[5]", "found [5], expected a whole number, 1 or more"),
        (
            "search.trials=1e3",
            "found the text '1e3', expected a whole number, 1 or more; write the number as 1000",
        ),
        (
            "search.trials=0x10",
            "found the text '0x10', expected a whole number, 1 or more; write the number as 16",
        ),
        ("search.seed=-1", "found -1, expected a whole number from 0 to 4294967295"),
        ("search.sampler=gp", "found the text 'gp', expected auto, tpe, random, qmc or nsga2"),
        ("search.parallel=0", "found 0, expected auto, or a whole number, 1 or more"),
        ("search.minutes=0", "found 0, expected a number of minutes above 0, or null"),
        ("measure.precision=1", "found 1, expected a number between 0 and 1, such as 0.01"),
        ("measure.finalists=true", f"found true, expected a whole number, 0 or more{YES}"),
        ("hardware.gpus=0", "found 0, expected a whole number, 1 or more: GPUs per node"),
        ("hardware.isolation=shared", "found the text 'shared', expected exclusive"),
        ("engine.time_scale=0", "found 0, expected a number above 0, at most 1000: times faster"),
        (
            "workload.shared_prefix=1",
            "found 1, expected a number from 0 to below 1: the share of a prompt",
        ),
        (
            "constraints=tp_size > 2",
            "found the text 'tp_size > 2', expected a list of at most 100 ",
        ),
        ("parameters.tp_size.int=[8]", "found [8], expected [low, high], two whole numbers"),
        (
            "parameters.tp_size.int=[1, 8.5]",
            (
                "parameters.tp_size.int.1: found 8.5; parameters.tp_size.int takes [low, high], "
                "two whole numbers"
            ),
        ),
        (
            "parameters.tp_size.choices=[]",
            (
                "found an empty list, expected a list of 1 to 1000 values, "
                "each text, a number, true or false"
            ),
        ),
        ("parameters.tp_size.choices=[1, null]", "parameters.tp_size.choices.1: found nothing; "),
        ("parameters.tp_size.step=0", "found 0, expected a whole number, 1 or more"),
        (
            "workload.concurrency=[1, 0]",
            (
                "workload.concurrency.1: found 0; workload.concurrency takes a list of 1 to 100 "
                "whole numbers above 0"
            ),
        ),
        ("workload.concurrency=[-8]", "workload.concurrency.0: found -8; "),
        ("workload.concurrency=[1.5]", "workload.concurrency.0: found 1.5; "),
        ("workload.concurrency=[yes]", "workload.concurrency.0: found true; "),
        ("workload.concurrency=[]", "found an empty list, expected a list of 1 to 100 whole"),
        ("workload.concurrency=8", "found 8, expected a list of 1 to 100 whole numbers above 0"),
        ("workload.prompt_tokens=0", "found 0, expected a whole number of tokens above 0, {"),
        (
            "workload.prompt_tokens=many",
            (
                "found the text 'many', expected a whole number of tokens above 0, {uniform: "
                "[low, high]}, {normal: [mean, sd]} or {file: lengths.jsonl}"
            ),
        ),
        ("slo.ttft_s=2", "found 2; slo takes limits in seconds above 0, e.g. {ttft_s: {p99: 2.0}}"),
        ("slo.ttft_s.p99=0", "found 0; slo takes limits in seconds above 0, e.g."),
        (
            'engine.env.X="a\\0b"',
            "found the text 'a\\x00b'; engine.env takes environment variables",
        ),
        ('engine.args.revision="a\\0b"', "found the text 'a\\x00b'; engine.args takes server"),
        ("engine.env.X=true", "found true; engine.env takes environment variables, each text or"),
        ("engine.args.page_size=[1]", "found [1]; engine.args takes server parameters, each text"),
        ("baselines=[5]", "baselines.0: found 5; baselines takes a list of at most 100 settings"),
        ("objectives=[]", "found an empty list, expected a list with at least one {metric: ...}"),
        ("name=5", "found 5, expected a name of a-z, 0-9, '.', '_' and '-', at most 100 long"),
    ],
)
def test_a_value_that_is_not_allowed(option: str, message: str) -> None:
    assert refused(option).startswith(message)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "engine=5",
            (
                "found 5, expected a section that says which engine, "
                "e.g. {kind: emulated, profile: ...}"
            ),
        ),
        (
            "search=[1]",
            (
                "found [1], expected a section with sampler, trials, seed, minutes, launches, "
                "energy_j, parallel"
            ),
        ),
        (
            "parameters.tp_size=5",
            "found 5, expected a section with choices, int, float, step, log, when",
        ),
        ("objectives=[5]", "objectives.0: found 5, expected a section with metric, concurrency, "),
        ("parameters={}", "found an empty section, expected 1 to 50 parameters, e.g. tp_size: "),
    ],
)
def test_a_section_that_is_none(option: str, message: str) -> None:
    assert refused(option).startswith(message)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("name=", "missing; expected a name of a-z, 0-9, '.', '_' and '-', at most 100 long"),
        ("engine=", "missing; expected a section that says which engine, e.g. {kind: emulated, "),
        ("parameters=", "missing; expected 1 to 50 parameters, e.g. tp_size: {choices: [1, 2]}"),
        ("objectives=[{concurrency: 8}]", "objectives.0.metric: missing; expected the name of a "),
    ],
)
def test_what_is_missing(option: str, message: str) -> None:
    assert refused(option).startswith(message)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("measure.precision=.nan", "found NaN, expected a finite number"),
        ("measure.precision=-.inf", "found infinity, expected a finite number"),
        ("parameters.mem_fraction_static.float=[0.1, .inf]", "found infinity, expected a finite"),
        ("engine.args.watchdog_timeout=1.0e999", "found infinity, expected a finite number"),
    ],
)
def test_numbers_that_are_none(option: str, message: str) -> None:
    assert message in refused(option)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10**30, "search.trials: found a number of more than 63 bits"),
        ({1: 2}, "search.trials: found the key 1, expected a key that is text"),
        (b"x", "search.trials: found a bytes, expected text, a number, true or false"),
    ],
)
def test_values_that_no_file_can_hold(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_study({**DOCUMENT, "search": {"trials": value}})
    assert str(caught.value).startswith(message)


def test_the_first_of_several_mistakes_is_shown_an_unknown_key_before_all() -> None:
    document: dict[str, Any] = {**DOCUMENT, "nmae": "x", "search": {"trials": 0, "seed": -1}}
    del document["name"]
    with pytest.raises(ConfigError) as caught:
        parse_study(document)
    message = str(caught.value)
    assert message.startswith("nmae: unknown key 'nmae'; did you mean 'name'?")
    assert message.endswith("(and 3 more)")
