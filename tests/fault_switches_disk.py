"""Mechanisms against faults of the disk: checkpoints, the folder of a run, what it writes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fault_switches import mechanism, nothing, replaced, wrapped

# -- checkpoints -------------------------------------------------------------------------------


def _old_ones_first(write: Any) -> Any:
    def call(self: Any, *args: Any) -> None:
        for step in self.steps():
            self._remove(step)
        write(self, *args)

    return call


mechanism(
    "the old checkpoint goes last",
    wrapped("dflash_ext.checkpoint:CheckpointManager._write", _old_ones_first),
    "test_checkpoint_saving.py::test_a_crash_at_any_point_leaves_a_whole_checkpoint",
)
mechanism(
    "failed saves are survived",
    replaced("dflash_ext.checkpoint:MAX_FAILED_SAVES", 1),
    "test_checkpoint_saving.py::test_full_disk_is_survived_a_few_times",
)
mechanism(
    "checkpoints are verified",
    replaced("dflash_ext.checkpoint:_verify", nothing),
    "test_checkpoint.py::test_damage_falls_back_and_says_so[damage_tensors]",
)
mechanism(
    "states of a checkpoint are compared with the drafter's",
    replaced("dflash_ext.pipeline:check_tensors", nothing),
    "test_damaged_drafters.py::test_resume_and_export[missing state]",
    "test_damaged_drafters.py::test_resume_and_export[another state]",
    "test_damaged_drafters.py::test_resume_and_export[cut state]",
)
mechanism(
    "a resumed run keeps its text",
    replaced("dflash_ext.resume:Resume.check_same_text", nothing),
    "test_train.py::test_resume_with_other_text_is_refused_unless_accepted",
)
mechanism(
    "a resumed run keeps its configuration",
    replaced("dflash_ext.resume:_check_same_run", nothing),
    "test_train.py::test_resume_with_another_configuration_is_refused",
)

mechanism(
    "the last save is tried again",
    replaced("dflash_ext.checkpoint:CheckpointManager.close", lambda self: self._join()),
    "test_checkpoint_saving.py::test_the_last_save_is_tried_again",
    "test_full_disk.py::test_the_last_checkpoint_is_tried_again_until_there_is_room",
)


def _all_or_error(prune: Any) -> Any:
    """Its errors count as those of the save."""

    def call(self: Any, step: int) -> None:
        try:
            prune(self, step)
        except OSError as error:
            raise RuntimeError from error

    return call


mechanism(
    "old checkpoints may stay",
    wrapped("dflash_ext.checkpoint:CheckpointManager._prune", _all_or_error),
    "test_checkpoint_saving.py::test_old_checkpoints_that_cannot_be_removed_do_not_end_the_run",
)

# -- the folder of a run -----------------------------------------------------------------------

mechanism(
    "a run's folder is its own",
    replaced("dflash_ext.run_folder:has_run", lambda run_dir: False),
    "test_train.py::test_a_second_run_in_the_same_folder_is_refused",
    "test_run_folder.py::test_checkpoints_of_another_run_are_not_mixed_with_this_one",
)
mechanism(
    "a run's folder is locked",
    replaced("dflash_ext.run_folder:_lock", lambda descriptor: True),
    "test_run_folder.py::test_one_training_at_a_time",
    "test_run_folder.py::test_a_second_training_is_locked_out_before_it_loads_or_writes",
    "test_run_folder.py::test_a_killed_training_frees_its_folder",
)
mechanism(
    "a run's folder is tried first",
    replaced("dflash_ext.train:claim", lambda *args: contextlib.nullcontext()),
    "test_run_folder.py::test_a_read_only_folder_is_found_before_anything_is_loaded",
)
mechanism(
    "a run without a checkpoint begins again",
    replaced("dflash_ext.checkpoint:CheckpointManager.steps", lambda self: [0]),
    "test_run_folder.py::test_a_run_that_died_before_its_first_checkpoint_begins_again",
)

# -- what it writes ----------------------------------------------------------------------------


def _in_place(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _forgetting(append: Any) -> Any:
    """Rows that cannot be written are lost."""

    def call(self: Any, step: int, row: Any) -> None:
        try:
            append(self, step, row)
        except OSError:
            self._held, self.unwritten = [], 0
            raise

    return call


mechanism(
    "rows that cannot be written wait",
    wrapped("dflash_ext.logger:MetricsFile.append", _forgetting),
    "test_logger.py::test_a_full_disk_costs_no_row_once_there_is_room",
)
mechanism(
    "files are replaced whole",
    replaced("dflash_ext.config:replace_file", _in_place),
    "test_full_disk.py::test_a_configuration_that_cannot_be_written_is_one_line_and_harms_no_older_one",
)
mechanism(
    "errors of the disk name their file",
    replaced("dflash_ext.export:naming", lambda path: contextlib.nullcontext()),
    "test_full_disk.py::test_the_last_checkpoint_is_tried_again_until_there_is_room",
)


def _export_last(finish: Any) -> Any:
    def call(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline.checkpoints.close()
        return finish(pipeline, *args, **kwargs)

    return call


mechanism(
    "the export comes before the last try to save",
    wrapped("dflash_ext.train:_finish", _export_last),
    "test_full_disk.py::test_the_drafter_is_exported_though_its_checkpoint_cannot_be_saved",
)

# -- W&B ---------------------------------------------------------------------------------------


def _once(serve: Any) -> Any:
    """The service is tried once."""

    def call(self: Any) -> None:
        try:
            self._feed(self._open(self._mode))
        except Exception as error:
            self._note(f"W&B is off: {error}")

    return call


mechanism(
    "W&B is tried again",
    wrapped("dflash_ext.wandb_sink:WandbSink._serve", _once),
    "test_wandb_sink.py::test_a_service_that_dies_is_started_again_and_loses_nothing",
    "test_wandb_sink.py::test_a_server_that_never_answers_leaves_an_offline_record",
    "test_wandb_sink.py::test_a_disk_that_wandb_cannot_use_ends_in_a_note",
)
mechanism(
    "W&B's own process is ended between tries",
    replaced("dflash_ext.wandb_sink:WandbSink._forget", nothing),
    "test_wandb_real.py::test_a_server_that_is_back_gets_all_rows",
)


def _from_the_start(init: Any) -> Any:
    return lambda self, path, after: init(self, path, -1)


mechanism(
    "W&B gets no row twice",
    wrapped("dflash_ext.wandb_sink:_Rows.__init__", _from_the_start),
    "test_wandb_sink.py::test_a_resumed_run_sends_what_the_server_does_not_have",
    "test_wandb_real.py::test_a_run_killed_behind_its_checkpoint_goes_on_without_a_row_twice",
)
mechanism(
    "nobody waits for W&B",
    replaced("dflash_ext.wandb_sink:WandbSink.wake", lambda self: self._thread.join(1.0)),
    "test_wandb_sink.py::test_hanging_service_costs_a_bounded_wait",
)
