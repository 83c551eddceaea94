"""Runs in other layouts train the same drafter; what is warmed up, and when."""

import hashlib
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_packing import epoch_plans, make_examples, make_planner
from tiny_run import TinyRun

from dflash_ext import target_setup
from dflash_ext.data.packing import BatchPlanner
from dflash_ext.drafter.loop import DrafterTrainLoop
from dflash_ext.hs_queue import BufferedHSQueue, Slot
from dflash_ext.target import Target
from dflash_ext.target_setup import representative_shapes, warm_up


def sha256(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def exported(run: TinyRun, name: str) -> str:
    return sha256(load_file(run.folder / name / "export" / "model.safetensors"))


def losses(run: TinyRun, name: str) -> list[float]:
    rows = (run.folder / name / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


SHORT = ("--train.steps=3", "--data.eval=[]", "--log.every=1")


def test_five_targets_and_three_drafters_train_as_one_target_and_three(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[DrafterTrainLoop] = []
    run_loop = DrafterTrainLoop.run
    monkeypatch.setattr(
        DrafterTrainLoop, "run", lambda self, worker: (loops.append(self), run_loop(self, worker))
    )
    drafters = "--topology.drafters=[cpu, cpu, cpu]"
    assert run("many", *SHORT, drafters, "--topology.targets=[cpu, cpu, cpu, cpu, cpu]") == 0
    hashes = {sha256(loop.model.state_dict()) for loop in loops}
    assert len(loops) == 3 and len(hashes) == 1
    assert run("few", *SHORT, drafters) == 0
    assert exported(run, "many") == exported(run, "few")
    assert losses(run, "many") == losses(run, "few")


def test_a_target_spread_over_devices_trains_the_same(run: TinyRun) -> None:
    flags = (*SHORT, "--train.kl_weight=0.3")
    assert run("one", *flags) == 0
    assert run("spread", *flags, "--topology.targets=[cpu+cpu, cpu]") == 0
    assert exported(run, "one") == exported(run, "spread")
    assert losses(run, "one") == losses(run, "spread")


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_slots_that_hold_nan_when_they_come_back_change_no_bit(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """What a batch leaves in a slot is never read again: all of it is written or zeroed."""
    flags = (*SHORT, "--train.kl_weight=0.3", "--train.steps=5")
    assert run("plain", *flags) == 0

    def poison(slot: Slot) -> None:
        for column, states in enumerate((slot.hidden, slot.last_hidden)):
            assert states is not None
            states[: int(slot.high_water[column])] = torch.nan

    owner, method = {"reader": (Slot, "set_free"), "writer": (BufferedHSQueue, "acquire")}[side]
    work, poisoned = getattr(owner, method), []

    def before(self, *args):
        slot = self if side == "reader" else work(self, *args)
        poison(slot)
        poisoned.append(slot)
        return work(self) if side == "reader" else slot

    monkeypatch.setattr(owner, method, before)
    assert run("poisoned", *flags) == 0
    assert len(poisoned) >= 5
    assert exported(run, "plain") == exported(run, "poisoned")
    assert losses(run, "plain") == losses(run, "poisoned")


# Warm-up


def test_representative_shapes() -> None:
    assert representative_shapes([]) == []
    assert representative_shapes([(3, 10)]) == [(3, 10)]
    shapes = [(1, 4096), (1, 4000), (1, 37), (12, 4096), (12, 4000), (13, 3781), (16, 3072), (5, 7)]
    assert representative_shapes(shapes) == [
        (13, 3781),  # the largest, 49,153 tokens
        (16, 64),  # rows and length divide by 16
        (13, 63),  # neither does
        (12, 64),  # the length does
        (1, 64),
        (1, 37),
    ]


def test_shapes_are_those_of_the_batches(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, forwarded = [], set()
    input_shapes, forward = BatchPlanner.input_shapes, Target.forward_capture
    monkeypatch.setattr(
        BatchPlanner,
        "input_shapes",
        lambda self, train: planned.append(input_shapes(self, train)) or planned[0],
    )

    def record(self, input_ids, layer_ids, on_layer, need_last):
        if layer_ids:
            forwarded.add(tuple(input_ids.shape))
        return forward(self, input_ids, layer_ids, on_layer, need_last)

    monkeypatch.setattr(Target, "forward_capture", record)
    assert run("a", "--train.epochs=1", "--train.steps=null") == 0
    assert planned == [forwarded]  # the epoch's and the evaluation's


def test_input_shapes_are_those_of_every_epoch():
    """Large data is cut anew in every epoch; the looks ahead are bounded."""
    examples = make_examples(160)
    planner = make_planner(examples, epochs=3)
    epochs = [{tuple(p.input_ids.shape) for p in plans} for plans in epoch_plans(planner, 3)]
    assert len(set.union(*epochs)) > len(epochs[0])
    assert planner.input_shapes() == set.union(*epochs)
    assert planner.input_shapes(train=False) == set()
    assert make_planner(examples, steps=2).input_shapes() == epochs[0]
    eight = make_planner(examples, epochs=8).input_shapes()
    assert make_planner(examples, steps=10**9).input_shapes() == eight > set.union(*epochs)


def test_a_targets_thread_begins_with_the_largest_input(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own streams, as on a GPU; the run itself stays as it is."""
    plan: list[int] = []
    forwarded: dict[str, list[tuple[int, int]]] = {}
    input_shapes, forward = BatchPlanner.input_shapes, Target.forward_capture

    def shapes(self, train):
        found = input_shapes(self, train)
        plan.extend(rows * length for rows, length in found)
        return found

    def record(self, input_ids, *others, **named):
        rows = forwarded.setdefault(threading.current_thread().name, [])
        rows.append(tuple(input_ids.shape))
        return forward(self, input_ids, *others, **named)

    assert run("plain", *SHORT, "--topology.targets=[cpu, cpu]") == 0
    monkeypatch.setattr(BatchPlanner, "input_shapes", shapes)
    monkeypatch.setattr(Target, "forward_capture", record)
    monkeypatch.setattr(target_setup, "needs_warm_up", lambda device: True)
    assert run("warm", *SHORT, "--topology.targets=[cpu, cpu]") == 0
    firsts = [rows[0] for name, rows in forwarded.items() if name != "MainThread"]
    assert [rows * length for rows, length in firsts] == [max(plan)] * 2
    assert losses(run, "warm") == losses(run, "plain")


def test_hybrid_targets_are_warmed_up_for_every_number_of_rows_and_range() -> None:
    shapes = [(12, 4096), (12, 4000), (13, 3781), (20, 2455), (24, 100), (7, 7)]
    # Of 48 heads a range has 1365 1/3 tokens; (12, 4096) and (20, 2455) share the 36th.
    full = [(13, 3781), (12, 4096), (24, 100), (7, 7)]
    found = representative_shapes(shapes, {16, 48})
    assert found[:3] == full[:3] and full[3] in found
    assert {rows for rows, _ in found} == {7, 12, 13, 20, 24}
    assert all(length <= 64 for _, length in found[3:])
    many = [(rows, 1366) for rows in range(2, 40)]
    found = representative_shapes(many, {48})
    assert found[:6] == [(rows, 1366) for rows in range(39, 33, -1)]
    assert {rows for rows, length in found if length <= 64} == set(range(2, 40))
    assert found == sorted(found, key=lambda s: -s[0] * s[1])


class FakeTarget:
    """Records the inputs of its passes."""

    device = torch.device("cpu")
    devices = (device,)
    info = type("Info", (), {"vocab_size": 7})
    gdn_kernels = None

    def __init__(self, log: list) -> None:
        self.log = log

    def forward_capture(self, input_ids, layer_ids, on_layer, need_last) -> None:
        assert int(input_ids.max()) < 7
        shape = tuple(input_ids.shape)
        self.log.append((self, shape, list(layer_ids), need_last, threading.get_ident()))


def test_largest_first_one_target_after_the_other_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list = []
    one, two = FakeTarget(log), FakeTarget(log)
    targets: dict = {"cpu": one, "cpu+cpu": two}
    assert warm_up(targets, [(2, 3), (4, 16)], [1, 2], True) == [] and log == []  # nothing to tune
    monkeypatch.setattr(target_setup, "needs_warm_up", lambda device: True)
    lines = warm_up(targets, [(2, 3), (4, 16), (2, 2)], [1, 2], True)  # (2, 2) is as (2, 3)
    thread = threading.get_ident()
    want = [((4, 16), [1, 2], True, thread), ((2, 3), [1, 2], True, thread)]
    assert [entry[1:] for entry in log] == want * 2
    assert [entry[0] for entry in log] == [one, one, two, two]
    assert lines[1].startswith("warm-up  cpu+cpu: 2 shapes of the target's input, the largest 4 x")
    assert warm_up(targets, [], [1], False) == []


def test_memory_is_given_back_when_all_devices_of_a_target_are_done(monkeypatch) -> None:
    """One device's cache is emptied with all others', where work may still be under way."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    devices = [torch.device(name) for name in ("cuda:1", "cuda:0", "cpu")]
    target_setup._give_back(SimpleNamespace(devices=devices))  # type: ignore[arg-type]
    assert log == ["cuda:1", "cuda:0", "empty"]


def test_slots_and_drafters_come_behind_the_warm_up(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def recorded(owner: type, method: str, event: str) -> None:
        work = getattr(owner, method)

        def call(self, *args, **kwargs):
            if event not in events or event == "forward":
                events.append(event)
            return work(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, call)

    make = target_setup.warm_up

    def noted(*args):
        events.append("warm-up")
        return make(*args)

    monkeypatch.setattr("dflash_ext.pipeline.warm_up", noted)
    monkeypatch.setattr(target_setup, "needs_warm_up", lambda device: True)
    recorded(Target, "forward_capture", "forward")
    recorded(Slot, "__init__", "slots")
    recorded(DrafterTrainLoop, "__init__", "drafters")
    assert run("a", *SHORT) == 0
    begin, end = events.index("warm-up"), events.index("slots")
    assert set(events[begin + 1 : end]) == {"forward"}
    assert end < events.index("drafters") and "slots" not in events[:begin]
