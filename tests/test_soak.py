"""Half an hour of short runs with random faults in one process, as a notebook or a server makes
them: threads, file handles, tensors and memory do not grow.

`python -m pytest -m slow tests/test_soak.py`; $SOAK_JSON names a file for the curves, $SOAK_SEED
and $SOAK_SECONDS another seed and length.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chaos import Chaos
from tiny_run import TinyRun

# Of the resident set, behind the warm-up. The allocator keeps what threads have used, so single
# runs differ by some MiB; a run that leaked its target alone (0.8 MiB) would show.
MAX_MIB_A_RUN = 0.25
WARM_UP = 0.5  # share of the runs in which allocators and caches fill


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5, id="short"),
        pytest.param(1800, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_with_random_faults_leave_nothing_behind(
    seconds: float, tiny_target_dir: Path, tiny_jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    chaos = Chaos(
        TinyRun(tiny_target_dir, tiny_jsonl, tmp_path), int(os.environ.get("SOAK_SEED", "0"))
    )
    end = time.monotonic() + min(seconds, float(os.environ.get("SOAK_SECONDS", "1800")))
    while time.monotonic() < end or len(chaos.curve) < 3:
        chaos.run()
    if path := os.environ.get("SOAK_JSON"):
        Path(path).write_text(chaos.report())
    for what in ("threads", "handles", "tensors"):
        values = [point[what] for point in chaos.curve]
        # The first runs have loaded everything.
        assert max(values) <= max(values[:3]), f"{what}: {values}"
    if seconds > 60:
        rss = [point["rss_mib"] for point in chaos.curve][int(len(chaos.curve) * WARM_UP) :]
        slope = float(np.polyfit(np.arange(len(rss)), rss, 1)[0])
        assert slope < MAX_MIB_A_RUN, f"{slope:.2f} MiB a run: {rss}"
    for outcome in chaos.counts:
        assert outcome in OUTCOMES, chaos.counts


OUTCOMES = {
    *(f"{worker} -> 1" for worker in ("prefetcher", "target", "drafter", "monitor")),
    *("none -> 0", "nan -> 1", "disk -> 1", "stall -> 1"),
    *("signal -> 143, resumed -> 0", "damage -> 0, resumed -> 0"),
}
