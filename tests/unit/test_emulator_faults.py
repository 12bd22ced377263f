"""Faults as they are written, and which launches they hit."""

from __future__ import annotations

import pytest

from runner.engines.emulator.faults.active import ActiveFaults
from runner.engines.emulator.faults.arguments import Argument
from runner.engines.emulator.faults.fault import Fault, parse_faults
from runner.engines.emulator.faults.identity import LaunchIdentity
from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.flags import parse_flags
from runner.engines.emulator.setup import set_up
from runner.engines.processes import START_VARIABLE
from runner.machine.profile import load_profile

NAMES = ("pp_size", "attention_backend", "cuda_graph")


def chosen(text: str, *words: str) -> ActiveFaults:
    """What a command line comes to on a machine."""
    flags = parse_flags([*words, "--fault", text])
    return set_up(flags, load_profile("h200-llama-3.1-8b")).faults


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("die-at-start", FaultKind.DIE_AT_START, Argument()),
        ("die-at-start:KeyError: 'x@y'", FaultKind.DIE_AT_START, Argument("KeyError: 'x@y'")),
        ("out-of-memory", FaultKind.OUT_OF_MEMORY, Argument("capture")),
        ("out-of-memory:load", FaultKind.OUT_OF_MEMORY, Argument("load")),
        ("die-after-requests:3", FaultKind.DIE_AFTER_REQUESTS, Argument("", (3,))),
        ("stop-sending:3", FaultKind.STOP_SENDING, Argument("requests", (3,))),
        ("stop-sending:500tokens", FaultKind.STOP_SENDING, Argument("tokens", (500,))),
        ("ghost-requests", FaultKind.GHOST_REQUESTS, Argument()),
        ("hold-memory:8", FaultKind.HOLD_MEMORY, Argument("", (8,))),
        ("leave-child:session", FaultKind.LEAVE_CHILD, Argument("session")),
        ("chunks:1,3,2", FaultKind.CHUNKS, Argument("", (1, 3, 2))),
        ("wrong-counts:-2", FaultKind.WRONG_COUNTS, Argument("", (-2,))),
        ("stream-errors:0.05", FaultKind.STREAM_ERRORS, Argument("", (0.05,))),
        ("heat:10,0.3", FaultKind.HEAT, Argument("", (10, 0.3))),
    ],
)
def test_a_kind_with_its_argument(text: str, kind: FaultKind, argument: Argument) -> None:
    assert parse_faults(text, NAMES) == (Fault(kind, argument, text=text),)


def test_options_in_any_order_and_several_faults_in_one_text() -> None:
    text = "heat:10,0.3 @when=pp_size > 1 @rate=0.2; none; die-at-start@rate=0.5"
    heat, death = parse_faults(text, NAMES)
    assert (heat.kind, heat.when, heat.rate) == (FaultKind.HEAT, "pp_size > 1", 0.2)
    assert (death.kind, death.when, death.rate) == (FaultKind.DIE_AT_START, None, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown fault ''; known are none, die-at-start, "),
        ("chunk:3", "unknown fault 'chunk' in 'chunk:3'; did you mean 'chunks'? known are none, "),
        ("chunks:0", "chunks takes counts of 1 or more, such as 4 or 1,3,2; found 'chunks:0'"),
        ("hang-at-start:3", "hang-at-start takes nothing after its name; found"),
        ("out-of-memory:lunch", "out-of-memory takes capture or load; found"),
        ("wrong-counts:2", "wrong-counts takes how many tokens too many (+2) or too few (-2)"),
        ("stop-sending:0tokens", "stop-sending takes a count of requests or tokens"),
        ("hold-memory:inf", "hold-memory takes seconds above 0, such as 8; found"),
        ("heat:10,1", "heat takes seconds and the share that the clock falls by, such as 10,0.3"),
        ("die-at-start@rate=2", "rate takes a share above 0 and up to 1, such as 0.05; found '2'"),
        ("die-at-start@every=2", "unknown option 'every' in fault 'die-at-start@every=2'; known"),
        ("die-at-start@when=pp_siz>1", "unknown setting 'pp_siz'; did you mean 'pp_size'?"),
        ("die-at-start@when=1 +", "'1 +' is not an expression"),
    ],
)
def test_a_bad_fault_is_told_in_one_message(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_faults(text, NAMES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("when", "words", "is_hit"),
    [
        ("pp_size > 1", (), False),
        ("pp_size > 1", ("--pp-size", "2"), True),
        ("attention_backend == 'fa3'", ("--attention-backend", "fa3"), True),
        ("attention_backend == 'fa3' or cuda_graph", ("--attention-backend", "triton"), True),
        ("not cuda_graph", ("--disable-cuda-graph",), True),
        ("max_running_requests >= 1", (), True),  # as resolved: it was not given
        ("numa_node == 0", (), False),  # has no value
    ],
)
def test_a_condition_speaks_of_the_settings_as_resolved(
    when: str, words: tuple[str, ...], is_hit: bool
) -> None:
    faults = chosen(f"hang-at-start@when={when}", *words)
    assert (FaultKind.HANG_AT_START in faults) is is_hit


def test_garbled_output_takes_a_depth_unless_told_otherwise() -> None:
    kind = FaultKind.GARBLED_OUTPUT
    assert kind not in chosen(kind, "--pp-size", "2")
    assert kind in chosen(kind, "--pp-size", "2", "--pp-async-batch-depth", "2")
    assert kind in chosen(f"{kind}@when=pp_size == 2", "--pp-size", "2")


def test_a_flag_is_refused_under_a_condition_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fault", "refuse-flag:--pp-size@when=pp_size > 2"]
    parse_flags([*words, "--pp-size", "2"])
    with pytest.raises(SystemExit):
        parse_flags([*words, "--pp-size", "4"])
    assert "unrecognized arguments: --pp-size" in capsys.readouterr().err


def test_a_condition_that_cannot_be_decided_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--fault", "refuse-flag@when=pp_size > 'a'"])
    assert ended.value.code == 2
    assert "cannot be evaluated for pp_size=1" in capsys.readouterr().err


def hit(seed: int) -> list[int]:
    """Which of 200 launches die at a rate of 0.2."""
    faults = parse_faults("die-at-start@rate=0.2", NAMES)
    return [
        launch
        for launch in range(200)
        if ActiveFaults.choose(faults, seed, identity(launch, 0).words, {}).by_kind
    ]


def identity(launch: int, replica: int, attempt: int = 1) -> LaunchIdentity:
    return LaunchIdentity.of({}, {START_VARIABLE: f"{launch}/{replica}/{attempt}"})


def test_a_rate_hits_its_share_of_the_launches_and_the_same_ones_again() -> None:
    assert 25 <= len(hit(0)) <= 55
    assert hit(0) == hit(0)
    assert hit(0) != hit(1)


def test_all_replicas_of_a_launch_share_its_fate_and_know_their_attempt() -> None:
    assert identity(7, 0).words == identity(7, 3).words != identity(8, 0).words
    assert identity(7, 0, attempt=2).attempt == 2


def test_by_hand_the_flags_make_the_launch_but_not_the_ports() -> None:
    def made(**args: int) -> LaunchIdentity:
        return LaunchIdentity.of(args, {"CUDA_VISIBLE_DEVICES": "0"})

    assert made(pp_size=2, port=1, nccl_port=2) == made(pp_size=2, port=3, nccl_port=4)
    assert made(pp_size=2) != made(pp_size=4)
