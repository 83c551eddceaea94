"""Signals and kills at random moments: a resumed run ends in the bits of one left alone.

`python -m pytest -m slow tests/test_kill.py -s` makes 50 rounds, every tenth of them with whole
`python -m dflash_ext.train` processes, whose imports and ends are part of their life. The rounds
are those of the seeds from $KILL_SEED on: a failed one can be made again.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kill_rounds import Rounds

FIRST_SEED = int(os.environ.get("KILL_SEED", "0"))
ROUNDS = int(os.environ.get("KILL_ROUNDS", "50"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("rounds"), tiny_target_dir)


def test_a_run_that_is_killed_twice_ends_in_the_same_bits(runs: Rounds) -> None:
    assert runs.killed_at(5, 10) == []  # the last checkpoints are those of steps 3 and 9


def test_signals_at_random_moments(runs: Rounds) -> None:
    assert runs.round(FIRST_SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_rounds_of_signals_at_random_moments(runs: Rounds) -> None:
    runs.python = 10
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(runs.round, range(FIRST_SEED, FIRST_SEED + ROUNDS)))
    for what, count in sorted(runs.counts.items()):
        print(f"{count:4} {what}")
    assert not any(found), "\n".join(line for lines in found for line in lines)
