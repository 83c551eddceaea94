"""The switches of what a run asks of its machine and of servers; see fault_switches.py."""

from __future__ import annotations

import contextlib
from typing import Any

from fault_switches import mechanism, nothing, raising, replaced, wrapped

mechanism(
    "what cannot fit is refused",
    replaced("dflash_ext.plan:Plan.check_memory", nothing),
    "test_plan.py::test_a_run_that_cannot_fit_ends_before_anything_is_loaded",
)
mechanism(
    "a drafter that no memory holds is refused",
    replaced("dflash_ext.plan:check_drafter", nothing),
    "test_plan.py::test_a_drafter_that_no_memory_holds_is_refused_with_numbers",
)
mechanism(
    "GPUs are asked for FP8",
    replaced("dflash_ext.fp8:CAPABILITY", (0, 0)),
    "test_fp8.py::test_gpus_without_fp8_are_refused",
)
mechanism(
    "a pause of the process is no stall",
    replaced("dflash_ext.supervisor:PAUSE_S", 1e9),
    "test_supervisor.py::test_time_in_which_the_process_did_not_run_is_no_stall",
)
mechanism(
    "what is printed may be lost",
    replaced("dflash_ext.train:losable_output", contextlib.nullcontext),
    "test_lost_output.py::test_a_run_whose_output_goes_away_goes_on",
)

# -- servers -----------------------------------------------------------------------------------


def _once(init: Any) -> Any:
    def call(self: Any, *args: Any, tries: int = 1, **kwargs: Any) -> None:
        init(self, *args, tries=1, **kwargs)

    return call


mechanism(
    "requests are tried again",
    wrapped("dflash_ext.server:ServerGenerator.__init__", _once),
    "test_server.py::test_trouble_that_passes",
)
mechanism(
    "an unfinished file is gone on with",
    replaced("dflash_ext.regenerate:resume_point", lambda file, *args: (file.truncate(0), 0)),
    "test_server.py::test_a_server_that_dies_loses_nothing",
)
mechanism(
    "odd replies are one line",
    wrapped("dflash_ext.server:ServerGenerator._request", raising(ValueError)),
    "test_server.py::test_odd_replies_are_one_line",
)


mechanism(
    "answers that are cut off are refused",
    wrapped(
        "dflash_ext.regenerate:_line", lambda line: lambda row, answer, _: line(row, answer, True)
    ),
    "test_regenerate.py::test_answers_cut_off_are_refused_and_training_passes_over_them",
)
