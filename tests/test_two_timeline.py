"""Timelines of step_two: what is covered, what is not, in milliseconds of a step."""

import pytest

from benchmarks.two_timeline import Activity, timeline, timelines, union

MS = 10**6


def test_overlap_of_training_and_sums() -> None:
    found = [
        Activity(0, 7, "nvjet_product", 0, 4 * MS),
        Activity(0, 7, "rms_norm", 4 * MS, 5 * MS),
        Activity(0, 20, "ncclDevKernel_AllReduce", 3 * MS, 7 * MS),
        Activity(0, 21, "Memcpy PtoP (Device -> Device)", 6 * MS, 8 * MS),
        Activity(0, 21, "vectorized_add", 8 * MS, 9 * MS),
        Activity(0, 7, "adamw_kernel", 12 * MS, 19 * MS),
        Activity(0, 7, "adamw_kernel", 19 * MS + 10_000, 20 * MS),
    ]
    row = timeline(found, steps=2)
    assert row == {
        "span": 10.0,
        "main": 6.495,
        "sums": 3.0,
        "both": 1.0,
        "exposed": 2.0,
        "idle": 1.505,
        "stalled": 1.5,
        "products": 2.0,
        "main_other": 4.495,
        "nccl": 2.0,
        "copies": 1.0,
        "additions": 0.5,
        "longest_wait": 7.0,
    }
    both = timelines([*found, Activity(1, 7, "nvjet_product", 0, MS)], steps=2)
    assert both["cuda:0"] == row
    assert both["cuda:1"]["span"] == both["cuda:1"]["main"] == pytest.approx(0.5)


def test_union() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []
