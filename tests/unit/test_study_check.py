from __future__ import annotations

import pytest

from runner.config import parse_study
from tests.study_samples import CAP, DEPTH, DOCUMENT, refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["constraints=[tp_size * pp_size == 7]"],
            (
                "constraints.0: 'tp_size * pp_size == 7' leaves no setting of servers with at "
                "most 8 GPUs"
            ),
        ),
        (
            ["constraints=[tp_size * pp_size == 64]"],
            (
                "constraints.0: 'tp_size * pp_size == 64' leaves no setting of servers with at "
                "most 8 GPUs"
            ),
        ),
        (
            ["constraints=[tp_size > 2, pp_size < 4, tp_size < 4]"],
            (
                "constraints.2: 'tp_size < 4' leaves no setting together with the constraints "
                "before it"
            ),
        ),
        (
            [f"constraints=[pp_size > 1, {DEPTH} + {CAP} > 72]"],
            (
                f"constraints.1: '{DEPTH} + {CAP} > 72' leaves no setting together with the "
                "constraints before it"
            ),
        ),
        (["constraints=[gpus == 9]"], "constraints.0: 'gpus == 9' leaves no setting"),
        (
            ["baselines=", "hardware.gpus=4"],
            (
                "constraints.0: 'tp_size * pp_size == 8' leaves no setting of servers with at "
                "most 4 GPUs"
            ),
        ),
        (
            ["baselines=", "parameters.tp_size.choices=[16, 32]", "hardware.gpus=8"],
            "found 8; every setting needs a server of more GPUs",
        ),
        (["baselines=[{name: big, tp_size: 16}]"], "baselines.0: big needs 16 GPUs, hardware.gpus"),
    ],
)
def test_a_space_without_settings(options: list[str], message: str) -> None:
    assert refused(*options).startswith(message)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("tp_size * pp_size", "gives 1, not true or false; compare it with something"),
        ("attention_backend > 1", "cannot be evaluated for attention_backend=triton"),
        (f"tp_size / {DEPTH} > 1", f"cannot be evaluated for {DEPTH}=0, tp_size=1: division by"),
    ],
)
def test_an_expression_that_would_fail_in_the_middle_of_a_study(
    constraint: str, message: str
) -> None:
    assert refused(f"constraints=[{constraint}]").startswith(
        f"constraints.0: '{constraint}' {message}"
    )
    in_condition = refused(f"parameters.cuda_graph.when={constraint}")
    assert in_condition.startswith(f"'{constraint}' {message}")


def test_a_guarded_expression_is_fine() -> None:
    constraint = f"{DEPTH} == 0 or tp_size / {DEPTH} > 0"
    assert parse_study(DOCUMENT, [f"constraints=[{constraint}]"]).constraints[0].text == constraint


def test_a_constraint_that_only_speaks_of_pipelines_leaves_the_others() -> None:
    settings = parse_study(DOCUMENT, [f"constraints=[{CAP} > 64]"])
    assert [each.text for each in settings.constraints] == [f"{CAP} > 64"]


def test_a_space_too_large_to_decide_is_accepted() -> None:
    options = [f"parameters.free_{letter}.int=[0, 1000000]" for letter in "abc"]
    options += ["constraints=[free_a + free_b + free_c == 3000000]"]
    assert len(parse_study(DOCUMENT, options).parameters) == 9


def test_several_mistakes_are_counted() -> None:
    message = refused("baselines=[{name: a, tp_size: 16}, {name: b, pp_size: 16}]")
    assert message.endswith("(and 1 more)")
