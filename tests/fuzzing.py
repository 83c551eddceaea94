"""Properties tried for a time instead of a number of examples."""

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, seed, settings

DURATIONS = pytest.mark.parametrize(
    "seconds",
    [3.0, pytest.param(600.0, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["short", "long"],
)


def fuzz(check: Callable[[], None], seconds: float, batch: int = 100) -> int:
    """Run `check`, a function under @given, in batches with new seeds until the time is used.

    The seeds count up from 0, so a failure comes again. Returns the number of examples asked for.
    """
    limited = settings(
        max_examples=batch,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(check)
    end, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < end:
        seed(number)(limited)()
        number += 1
    print(f"{check.__name__}: {batch * number} examples in {seconds:.0f} s")
    return batch * number
