"""What makes a fault harmless, mechanism by mechanism: how to turn it off, and the tests of it.

``pytest --fault-off NAME`` runs any tests with that mechanism turned off; ``test_faults.py`` shows
that each mechanism's tests then fail.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

VARIABLE = "DFLASH_TEST_FAULT_OFF"  # for child processes
Off = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mechanism:
    """off: changes the product so that it lacks the mechanism, and nothing else.

    tests: FILE::NAME or FILE::NAME[CASE] below tests/. All cases of a NAME alone must fail.
    """

    off: Off
    tests: tuple[str, ...]


MECHANISMS: dict[str, Mechanism] = {}


def mechanism(name: str, off: Off, *tests: str) -> None:
    assert name not in MECHANISMS and tests
    MECHANISMS[name] = Mechanism(off, tests)


def turn_off(name: str, patch: pytest.MonkeyPatch) -> None:
    MECHANISMS[name].off(patch)


def turn_off_in_child() -> None:
    """In a process that a test starts: what ``--fault-off`` says in the test's own."""
    if name := os.environ.get(VARIABLE):
        turn_off(name, pytest.MonkeyPatch())


def replaced(place: str, value: Any) -> Off:
    """place: "dflash_ext.module:Name" or "dflash_ext.module:Class.method"."""

    def off(patch: pytest.MonkeyPatch) -> None:
        owner, name = found(place)
        patch.setattr(owner, name, value)

    return off


def wrapped(place: str, wrap: Callable[[Any], Any]) -> Off:
    """The value at the place replaced by wrap(value)."""

    def off(patch: pytest.MonkeyPatch) -> None:
        owner, name = found(place)
        patch.setattr(owner, name, wrap(getattr(owner, name)))

    return off


def found(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner = importlib.import_module(module)
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def nothing(*args: object, **kwargs: object) -> None:
    """In the place of a check: finds nothing wrong."""


def raising(error: type[Exception]) -> Callable[[Any], Any]:
    """wrap: UserErrors stay what they were made of, or become `error`."""

    def wrap(function: Any) -> Any:
        from dflash_ext.config import UserError

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except UserError as wrong:
                raise (wrong.__cause__ or error(str(wrong))) from None

        return call

    return wrap


# -- workers and signals -----------------------------------------------------------------------

mechanism(
    "the first error is kept",
    replaced("dflash_ext.supervisor:Supervisor.fail", lambda self, place, error: self.stop.set()),
    "test_supervisor.py::test_first_error_is_reported_with_its_place_and_ends_the_others",
    "test_train.py::test_a_fault_ends_the_run_with_its_own_error",
    "test_faults.py::test_a_worker_that_raises_at_any_moment_ends_the_run[target in training]",
    "test_faults.py::test_a_worker_that_raises_at_any_moment_ends_the_run[drafter in evaluation]",
)
mechanism(
    "errors of the writer surface",
    wrapped(
        "dflash_ext.checkpoint:CheckpointManager._join",
        lambda join: lambda self: contextlib.suppress(ZeroDivisionError)(join)(self),
    ),
    "test_faults.py::test_a_worker_that_raises_at_any_moment_ends_the_run[writer, noticed later]",
    "test_faults.py::test_a_worker_that_raises_at_any_moment_ends_the_run"
    "[writer, noticed at the end]",
)
mechanism(
    "watchdog",
    replaced("dflash_ext.supervisor:Supervisor._stalled", nothing),
    "test_supervisor.py::test_watchdog_names_what_every_worker_did",
    "test_faults.py::test_a_target_that_stalls_ends_the_run",
)
mechanism(
    "weights that are not finite are not saved",
    replaced("dflash_ext.pipeline:check_finite", nothing),
    "test_nonfinite.py::test_weights_that_overflow_replace_no_checkpoint_and_are_not_exported",
)


def _deaf(*args: object) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


mechanism(
    "signals set a flag",
    replaced("dflash_ext.supervisor:Supervisor.install_signal_handlers", _deaf),
    "test_faults.py::test_a_signal_at_an_odd_moment_is_a_saved_stop",
)
mechanism(
    "signals end the loading",
    replaced("dflash_ext.train:end_at_signals", lambda: contextlib.nullcontext(_deaf())),
    "test_faults.py::test_a_signal_while_loading_ends_the_command",
)
mechanism(
    "out of memory is explained",
    replaced("dflash_ext.train:is_out_of_memory", lambda error: False),
    "test_faults.py::test_out_of_memory_names_the_plan_and_the_field_to_lower",
    "test_faults.py::test_slots_that_are_too_large_for_this_machine",
)
mechanism(
    "drafters agree on the last step",
    replaced("dflash_ext.supervisor:Supervisor.begin_step", lambda self, step: True),
    "test_supervisor.py::test_a_signal_stops_all_ranks_behind_the_furthest_begun_step",
    "test_train.py::test_resume_is_exact",
)
mechanism(
    "silent processes are noticed",
    replaced("dflash_ext.machines:Machines._silent_for", lambda self, seconds: []),
    "test_machines.py::test_silence_is_noticed",
    "test_machines.py::test_a_lost_process_ends_the_run_and_a_restart_goes_on_exactly",
)
mechanism(
    "processes compare what they train",
    replaced("dflash_ext.machines:Machines.check_same", nothing),
    "test_machines.py::test_processes_that_differ_are_refused",
)

# -- non-finite steps --------------------------------------------------------------------------


def _without_found_inf(adamw: Any) -> Any:
    def call(*args: Any, found_inf: torch.Tensor, **kwargs: Any) -> None:
        adamw(*args, found_inf=torch.zeros_like(found_inf), **kwargs)

    return call


mechanism(
    "non-finite steps are skipped",
    wrapped("dflash_ext.optim:adamw", _without_found_inf),
    "test_optim.py::test_nonfinite_step_changes_nothing_but_the_count",
    "test_faults.py::test_a_step_that_is_not_finite_is_skipped_counted_and_named",
)
mechanism(
    "non-finite steps are noted",
    replaced("dflash_ext.nonfinite:NonfiniteLog.step", nothing),
    "test_faults.py::test_a_step_that_is_not_finite_is_skipped_counted_and_named",
)
mechanism(
    "batches of a non-finite step are kept",
    replaced("dflash_ext.nonfinite:explain", lambda *args: ""),
    "test_faults.py::test_nonfinite_steps_in_a_row_end_the_run_and_leave_their_batch",
)
mechanism(
    "non-finite steps in a row are bounded",
    replaced("dflash_ext.monitor:Monitor._check_finite", nothing),
    "test_train.py::test_steps_without_a_finite_gradient_are_skipped_counted_and_stop_the_run",
    "test_faults.py::test_nonfinite_steps_in_a_row_end_the_run_and_leave_their_batch",
)
mechanism(
    "a drafter that was never trained is not exported",
    replaced("dflash_ext.nonfinite:check_trained", nothing),
    "test_nonfinite.py::test_a_run_whose_steps_were_all_skipped_ends_without_an_export",
)

# -- text --------------------------------------------------------------------------------------


def _raw_gzip(self: Any, packed: str) -> Any:
    with (gzip.open if packed == ".gz" else open)(self.name, "rb") as file:
        yield file.read()


def _ending_at_bad_rows(rows: Any) -> Any:
    """Whatever data.bad_rows says."""

    def call(self: Any, *args: Any) -> Any:
        self.cfg.bad_rows = "error"
        return rows(self, *args)

    return call


def _whatever_is_there(read_part: Any) -> Any:
    def call(folder: Any, place: Any) -> Any:
        part = read_part(folder, place)
        if part is None and folder.exists():
            raise OSError(f"{folder}: damaged")
        return part

    return call


mechanism(
    "bytes that are no text are named",
    replaced("dflash_ext.data.readers:_decoded", lambda raw, place: raw.decode()),
    "test_readers.py::test_damaged_files_are_one_line[utf16.json]",
)
mechanism(
    "damaged archives are one line",
    wrapped("dflash_ext.data.readers:FileShard._chunks", lambda _: _raw_gzip),
    "test_readers.py::test_damaged_files_are_one_line[cut.jsonl.gz]",
    "test_readers.py::test_damaged_files_are_one_line[flip.jsonl.gz]",
    "test_readers.py::test_damaged_files_are_one_line[plain.jsonl.gz]",
)
mechanism(
    "text is looked for first",
    replaced("dflash_ext.pipeline:text_files", nothing),
    "test_train.py::test_text_that_is_not_there_is_found_before_the_target_is_loaded",
)
mechanism(
    "a missing package names its extra",
    replaced(
        "dflash_ext.data.readers:needs",
        lambda package, extra, place: importlib.import_module(package),
    ),
    "test_readers.py::test_a_missing_package_names_the_extra",
)
mechanism(
    "bad rows can be skipped",
    wrapped("dflash_ext.data.conversations:_Encoder.rows", _ending_at_bad_rows),
    "test_readers.py::test_bad_rows_can_be_skipped_and_are_counted",
)
mechanism(
    "cached text is looked through",
    wrapped("dflash_ext.data.corpus:_read_part", _whatever_is_there),
    "test_corpus.py::test_a_damaged_part_is_made_again",
)
mechanism(
    "strange text is warned of",
    replaced("dflash_ext.text_check:LOW_LOG_PROB", -float("inf")),
    "test_text_check.py::test_other_text_is_warned_of",
)
mechanism(
    "how the text was made is compared",
    replaced("dflash_ext.text_check:mismatches", lambda *args: []),
    "test_text_check.py::test_text_that_was_made_otherwise_is_named",
)


def _masks_not_counted(rows: Any) -> Any:
    def call(self: Any, shard: Any, report: Any) -> Any:
        report.all_supervised -= 10**6
        yield from rows(self, shard, report)

    return call


def _spans_by_length(render: Any, text: str, messages: Any, turns: Any, place: str) -> Any:
    """The assistant's turns where they would be if no template ever rewrote one."""
    from dflash_ext.data.assistant_mask import _Span

    prompts = [len(render(messages[:i], add_generation_prompt=True)) for i in turns]
    ends = [len(render(messages[: i + 1]).rstrip()) for i in turns]
    return [_Span(*pair) for pair in zip(prompts, ends, strict=True)]


mechanism(
    "masks of all ones are refused",
    wrapped("dflash_ext.data.conversations:_Encoder.rows", _masks_not_counted),
    "test_check_data.py::test_masks_of_all_ones_are_refused",
)
mechanism(
    "rewritten turns are not learned",
    replaced("dflash_ext.data.assistant_mask:_turn_spans", _spans_by_length),
    "test_wild_data.py::test_two_turns[qwen3-False]",
    "test_wild_data.py::test_two_turns[qwen3.5-False]",
)
mechanism(
    "stored states are compared with the target",
    replaced("dflash_ext.hidden_cache:HiddenCache.verify", lambda self: ["", "", ""][:2]),
    "test_hidden_cache.py::test_what_is_declared_is_compared_with_the_target",
)
mechanism(
    "damaged states are one line",
    wrapped("dflash_ext.hidden_cache:HiddenCache.read", raising(ValueError)),
    "test_hidden_cache.py::test_damaged_and_foreign_files_are_one_line",
)
mechanism(
    "damage that a worker finds is no failure of the program",
    replaced("dflash_ext.supervisor:UserError", ZeroDivisionError),
    "test_hidden_cache.py::test_a_bad_file_that_training_comes_to_is_one_line",
)

# -- drafters, exports, files ------------------------------------------------------------------


mechanism(
    "a drafter's folder is read with care",
    wrapped("dflash_ext.export:read_export", raising(ValueError)),
    "test_damaged_drafters.py::test_evaluate_and_init_from[not finite]",
)
mechanism(
    "a drafter's tensors are those of its configuration",
    replaced("dflash_ext.export:check_tensors", nothing),
    "test_damaged_drafters.py::test_evaluate_and_init_from[another shape]",
    "test_damaged_drafters.py::test_evaluate_and_init_from[missing tensor]",
)
mechanism(
    "other kinds of drafters are refused",
    replaced("dflash_ext.drafter.hf_config:_File.check_plain", nothing),
    "test_warm_start.py::test_a_drafter_of_another_kind_is_refused[{'hidden_act': 'gelu'}-]",
    "test_warm_start.py::test_a_drafter_of_another_kind_is_refused[{'draft_vocab_size': 100}-]",
)
mechanism(
    "exports are compared with the trained drafter",
    replaced("dflash_ext.export_check:check_config", nothing),
    "test_export_check.py::test_a_changed_config_is_noticed[logit_scale]",
    "test_export_check.py::test_a_changed_config_is_noticed[auto_map]",
)


def _tokens(path: Any) -> Any:
    return (json.loads(path.read_text())["tokens"] or [0]) * 9


mechanism(
    "kept greedy texts are looked through",
    replaced(
        "dflash_ext.greedy_text:GreedyTextCache._stored",
        lambda self, path, prompt: _tokens(path) if path.exists() else [],
    ),
    "test_clean_commands.py::test_a_damaged_cached_text_is_made_again",
)
mechanism(
    "output files are tried first",
    replaced("dflash_ext.evaluate:check_output_file", nothing),
    "test_clean_commands.py::test_evaluate_refuses_its_output_first",
)
mechanism(
    "the hub is quiet",
    replaced("dflash_ext.target:quiet_hub", contextlib.nullcontext),
    "test_clean_commands.py::test_the_hub_retries_in_silence",
)
mechanism(
    "hostile configurations are one line",
    wrapped("dflash_ext.config:read_yaml", raising(ValueError)),
    "test_fuzz_config.py::test_hostile_files[control]",
)

for more in ("disk", "resume", "runs"):  # they register theirs
    importlib.import_module(f"fault_switches_{more}")
