"""The switches of what makes a run go on exactly; see fault_switches.py."""

import torch
from fault_switches import mechanism, nothing, replaced


def _unseeded(*key: int) -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


KILLED = "test_kill.py::test_a_run_that_is_killed_twice_ends_in_the_same_bits"
mechanism(
    "the optimizer's state is restored",
    replaced("dflash_ext.optim:DrafterOptimizer.load_state_tensors", nothing),
    KILLED,
)
mechanism(
    "noise depends on the batch alone",
    replaced("dflash_ext.drafter.noise:seeded_generator", _unseeded),
    KILLED,
)
mechanism(
    "anchors depend on the batch alone",
    replaced("dflash_ext.data.packing:seeded_generator", _unseeded),
    KILLED,
)
mechanism(
    "rows are logged before a checkpoint counts",
    replaced("dflash_ext.monitor:Monitor.wait_logged", nothing),
    "test_resume.py::test_rows_are_in_the_log_before_a_checkpoint_counts",
)
mechanism(
    "a run without its last evaluation is not complete",
    replaced(
        "dflash_ext.pipeline:Pipeline.complete",
        property(lambda self: self.done_steps == self.total_steps),
    ),
    "test_resume.py::test_a_signal_in_the_last_evaluation_leaves_it_to_the_resumed_run",
)
mechanism(
    "other numbers of drafters go on with the next batch",
    replaced(
        "dflash_ext.data.packing:BatchPlanner.first_batch",
        lambda self, step: step * self.batches_per_step,
    ),
    "test_resume.py::test_every_example_once_an_epoch_with_any_numbers_of_drafters",
)
mechanism(
    "a resumed run's target is compared",
    replaced("dflash_ext.resume:Resume.check_same_target", nothing),
    "test_resume.py::test_a_target_that_changed_in_place_is_refused",
)
mechanism(
    "a mistyped name starts nothing",
    replaced("dflash_ext.train:_check_begun", nothing),
    "test_resume.py::test_a_mistyped_name_does_not_start_the_default_run",
)
