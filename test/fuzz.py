"""Runs a hypothesis state machine for a while instead of for a number of examples.

`HISPARSE_FUZZ_SECONDS` is the length of every fuzz test; not given, each has its own short one. Seeds are 0, 1, 2, ...,
or start at `HISPARSE_FUZZ_SEED`; a failure prints the seed, and the shortest script of calls that still fails.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ROUND = settings(
    database=None,
    deadline=None,
    derandomize=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def fuzz(
    machine: type[RuleBasedStateMachine], *, seconds: float, examples: int, steps: int, shrink: bool = True
) -> int:
    """Run rounds of `examples` histories of at most `steps` calls until the time is over; how many rounds it took."""
    seconds = float(os.environ.get("HISPARSE_FUZZ_SECONDS", seconds))
    first = int(os.environ.get("HISPARSE_FUZZ_SEED", 0))
    deadline = time.monotonic() + seconds
    for number in itertools.count(first):
        phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
        _round(machine, number, settings(ROUND, max_examples=examples, stateful_step_count=steps, phases=phases))
        if time.monotonic() > deadline:
            return number - first + 1
    raise AssertionError("unreachable")


def _round(machine: type[RuleBasedStateMachine], number: int, how: settings) -> None:
    seeded: Any = type(machine.__name__, (machine,), {})
    try:
        run_state_machine_as_test(seed(number)(seeded), settings=how)
    except BaseException as error:
        error.add_note(f"fuzz seed: HISPARSE_FUZZ_SEED={number}")
        raise
