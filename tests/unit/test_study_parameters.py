from __future__ import annotations

import pytest

from runner.config import parse_study
from tests.study_samples import CAP, DEPTH, DOCUMENT, refused

VALID = f"attention_backend, cuda_graph, gpus, nodes, page_size, {DEPTH}, {CAP}, pp_size, tp_size"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("parameters.x={}", "found none of them, expected exactly one of choices, int and float"),
        (
            "parameters.tp_size.int=[1, 8]",
            (
                "parameters.tp_size: found choices and int, expected exactly one of choices, "
                "int and float"
            ),
        ),
        ("parameters.x.int=[8, 0]", "found [8, 0], expected [low, high] with low <= high"),
        ("parameters.x.float=[1, 0.5]", "found [1.0, 0.5], expected [low, high] with low <= high"),
        (
            "parameters.x={int: [1, 8], step: 2, log: true}",
            "parameters.x.step: found a step with log: true; keep one of them",
        ),
        (
            "parameters.x={int: [0, 8], log: true}",
            "parameters.x.int: found low 0 with log: true, expected 1 or more",
        ),
        (
            "parameters.x={float: [0, 8], log: true}",
            "parameters.x.float: found low 0.0 with log: true, expected a number above 0",
        ),
        (
            "parameters.x={int: [1, 8], step: 9}",
            "parameters.x.step: found 9, larger than the range [1, 8]",
        ),
        (
            "parameters.x={float: [0, 8], step: 2}",
            "parameters.x.step: found a step with float; only an int range has one",
        ),
        (
            "parameters.x={choices: [1, 2], log: true}",
            "parameters.x.log: found log with choices; only an int or float range has it",
        ),
        ("parameters.x.choices=[1, 2, 1]", "parameters.x.choices.2: found 1 twice; keep one"),
        ("parameters.x.choices=[1, true]", "parameters.x.choices.1: found true twice; keep one"),
        (
            "parameters.tp_size.choices=[1, two]",
            (
                "parameters.tp_size.choices.1: found the text 'two', expected a whole number, 1 or "
                "more"
            ),
        ),
        (
            "parameters.cuda_graph.choices=[on, 0]",
            "parameters.cuda_graph.choices.1: found 0, expected true or false",
        ),
        (
            "parameters.mem_fraction_static.float=[0.5, 1]",
            "found [0.5, 1.0], but mem_fraction_static is a number between 0 and 1",
        ),
        (
            "parameters.max_running_requests.float=[1, 2]",
            "found [1.0, 2.0], but max_running_requests is a whole number, 1 or more",
        ),
    ],
)
def test_a_range_that_is_none(option: str, message: str) -> None:
    assert refused(option) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp_sise", "unknown server parameter 'tp_sise'; did you mean 'tp_size'?"),
        ("tp", "'tp' is written 'tp_size' here"),
        ("port", "'port' is set by this program; leave it out"),
        ("gpus", "'gpus' is the number of hardware.gpus; use another name"),
        ("page_size", "also in engine.args, where it is fixed; keep one"),
        ("Other", "found the name 'Other', expected lower-case letters, digits and '_'"),
        ("max", "found the name 'max', expected lower-case letters, digits and '_'"),
    ],
)
def test_a_name_that_cannot_be_searched(name: str, message: str) -> None:
    assert refused(f"parameters.{name}={{choices: [1, 2]}}") == message


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            "pp_sise > 1",
            f"'pp_sise > 1': unknown name 'pp_sise'; did you mean 'pp_size'? Valid: {VALID}",
        ),
        ("zzz > 1", f"'zzz > 1': unknown name 'zzz'; valid: {VALID}"),
        ("pp_size >", "'pp_size >' is not an expression; write for example 'pp_size > 1'"),
    ],
)
def test_a_condition_or_constraint_that_is_none(condition: str, message: str) -> None:
    assert refused(f"parameters.cuda_graph.when={condition}") == message
    assert refused(f"constraints=[{condition}]") == f"constraints.0: {message}"


def test_conditions_that_go_round_in_a_circle() -> None:
    assert refused("parameters.cuda_graph.when=cuda_graph") == (
        "conditions go round in a circle: cuda_graph -> cuda_graph"
    )
    assert refused(f"parameters.pp_size.when={DEPTH} > 1") == (
        f"conditions go round in a circle: pp_size -> {DEPTH} -> pp_size"
    )


@pytest.mark.parametrize(
    ("baselines", "message"),
    [
        (
            "[{tp_size: 8}]",
            "baselines.0: missing name; write for example {name: tp8, tp_size: 8}",
        ),
        (
            "[{name: a/b}]",
            (
                "baselines.0.name: found the text 'a/b', expected a name of letters, digits, "
                "'.', '_' and '-', at most 100 long"
            ),
        ),
        ("[{name: 8}]", "baselines.0.name: found 8, expected a name of letters, digits, '.', '_' "),
        (
            "[{name: a, tp_size: 8}, {name: a, tp_size: 4}]",
            "baselines.1.name: 'a' is taken; names differ",
        ),
        (
            "[{name: a, tp_size: 8}, {name: b, tp_size: 8}]",
            "baselines.1: the same setting as baseline 'a'",
        ),
        (
            "[{name: a, tp_sise: 8}]",
            "baselines.0.tp_sise: unknown parameter 'tp_sise'; did you mean 'tp_size'?",
        ),
        (
            "[{name: a, max_running_request: 8}]",
            (
                "baselines.0.max_running_request: unknown server parameter 'max_running_request'; "
                "did you mean 'max_running_requests'?"
            ),
        ),
        (
            "[{name: a, tp_size: eight}]",
            "baselines.0.tp_size: found the text 'eight', expected a whole number, 1 or more",
        ),
        (
            "[{name: a, max_running_requests: 0}]",
            "baselines.0.max_running_requests: found 0, expected a whole number, 1 or more",
        ),
        ("[{name: a, own: x}]", "baselines.0.own: found the text 'x', expected a whole number"),
        ("[{name: a, share: x}]", "baselines.0.share: found the text 'x', expected a number"),
        ("[{name: a, way: 1}]", "baselines.0.way: found 1, expected a value like the text 'left'"),
    ],
)
def test_a_baseline_that_is_none(baselines: str, message: str) -> None:
    own = ("parameters.own.int=[1, 2]", "parameters.share.float=[0, 1]")
    way = "parameters.way.choices=[left, right]"
    assert refused(*own, way, f"baselines={baselines}").startswith(message)


def test_a_whole_number_for_a_real_parameter_becomes_real() -> None:
    settings = parse_study(
        DOCUMENT,
        [
            "parameters.share.float=[0, 1]",
            "baselines=[{name: a, share: 1, schedule_conservativeness: 1}]",
        ],
    )
    params = settings.baselines[0].params
    assert [type(value) for value in params.values()] == [float, float]
