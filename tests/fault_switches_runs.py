"""The switches of what a run asks of its machine; see fault_switches.py."""

from __future__ import annotations

from fault_switches import mechanism, nothing, replaced

mechanism(
    "what cannot fit is refused",
    replaced("dflash_ext.plan:Plan.check_memory", nothing),
    "test_plan.py::test_a_run_that_cannot_fit_ends_before_anything_is_loaded",
)
mechanism(
    "GPUs are asked for FP8",
    replaced("dflash_ext.fp8:CAPABILITY", (0, 0)),
    "test_fp8.py::test_gpus_without_fp8_are_refused",
)
