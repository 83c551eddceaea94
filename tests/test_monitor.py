"""Rows of the log: in ascending order, each whole."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ext.machines import Machines
from dflash_ext.monitor import Monitor

SCORE = {"eval_accept_len": 1.5}


class Log:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, row: dict[str, Any]) -> None:
        self.rows.append((step, row))


@pytest.fixture
def monitor() -> Monitor:
    drafter: Any = SimpleNamespace(steps=range(4, 20), eval_steps={4, 10, 20})
    return Monitor(
        Log(),  # type: ignore[arg-type]
        drafters=[drafter],
        targets=[],
        queues=[],
        lr_at=lambda step: 0.0,
        block_size=4,
        first_batch=lambda step: step,
        max_nonfinite_steps=3,
        tokens_before=0,
        finished=lambda: False,
        machines=Machines(),
        load=None,  # type: ignore[arg-type]
    )


def test_an_evaluation_waits_for_the_row_of_its_step(monitor: Monitor) -> None:
    """Shares of other machines may come behind it, those of earlier steps, too."""
    monitor.evals = {20: SCORE}
    monitor._flush(everything=False)
    monitor._rows = {19: {"loss": 2.0}}
    monitor._flush(everything=False)
    assert monitor.logger.rows == [(19, {"loss": 2.0})]
    monitor._rows = {20: {"loss": 1.0}}
    monitor._flush(everything=False)
    assert monitor.logger.rows[1:] == [(20, {"loss": 1.0} | SCORE)]


def test_the_evaluation_before_the_first_step_has_no_row_to_wait_for(monitor: Monitor) -> None:
    monitor.evals = {4: SCORE}
    monitor._flush(everything=False)
    assert monitor.logger.rows == [(4, SCORE)]


def test_an_evaluation_whose_row_is_lost_is_logged(monitor: Monitor) -> None:
    monitor.evals = {10: SCORE}
    monitor._rows = {12: {"loss": 2.0}}
    monitor._flush(everything=False)
    assert monitor.logger.rows == [(10, SCORE), (12, {"loss": 2.0})]
    monitor.evals[20] = SCORE
    monitor._flush(everything=True)
    assert monitor.logger.rows[2:] == [(20, SCORE)]


def test_a_row_waits_for_the_evaluation_of_its_step(monitor: Monitor) -> None:
    monitor._rows = {10: {"loss": 2.0}, 11: {"loss": 1.0}}
    monitor._flush(everything=False)
    assert monitor.logger.rows == []
    monitor.evals[10] = SCORE
    monitor._flush(everything=False)
    assert monitor.logger.rows == [(10, {"loss": 2.0} | SCORE), (11, {"loss": 1.0})]
