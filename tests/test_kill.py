"""Signals and kills at random moments: a resumed run ends in the bits of one left alone.

`python -m pytest -m slow tests/test_kill.py -s` makes 50 rounds, every tenth of them with whole
`python -m dflash_ext.train` processes, whose imports and ends are part of their life.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kill_rounds import Rounds

FIRST_SEED = int(os.environ.get("KILL_SEED", "0"))  # to repeat the round of a seed


@pytest.mark.parametrize(
    ("rounds", "python", "at_once"),
    [
        pytest.param(2, 0, 1, id="few"),
        pytest.param(50, 10, 3, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_killed_and_resumed_runs_end_in_the_same_bits(
    rounds: int, python: int, at_once: int, tmp_path: Path, tiny_target_dir: Path
) -> None:
    runs = Rounds(tmp_path, tiny_target_dir, python)
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(runs.round, range(FIRST_SEED, FIRST_SEED + rounds)))
    for what, count in sorted(runs.counts.items()):
        print(f"{count:4} {what}")
    assert not any(found), "\n".join(line for lines in found for line in lines)
