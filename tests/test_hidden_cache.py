"""Training from hidden states that speculators or SpecForge stored."""

import dataclasses
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_ext import train
from dflash_ext.command import run_command
from dflash_ext.config import DataConfig, TrainConfig, UserError
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.packing import BatchPlanner, Ticket
from dflash_ext.hidden_cache import HiddenCache
from dflash_ext.hs_queue import Slot
from dflash_ext.layout import BlockLayout
from dflash_ext.target import Target, load_target, load_tokenizer
from dflash_ext.target_loop import TargetForwardLoop

STORED = [1, 2, 4]
WANTED = [1, 4]
ROWS = 12
SEVEN = torch.tensor([7])
WRITERS = ("speculators", "specforge", "specforge-gz")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


def capture(target: Target, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layers [S, F, H], last states before and behind the final norm [S, H]."""
    layers: list[torch.Tensor] = []
    raw: list[torch.Tensor] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0][0]))
    last = target.forward_capture(
        torch.tensor([ids]), STORED, lambda i, h: layers.append(h[0]), need_last=True
    )
    hook.remove()
    assert last is not None
    return torch.stack(layers, dim=1), raw[0], last[0]


@pytest.fixture(params=WRITERS)
def stored(request, target: Target, tmp_path: Path) -> DataConfig:
    """Rows of ids and their hidden states, as the other trainers write them."""
    generator = torch.Generator().manual_seed(3)
    folder = tmp_path / "states"
    folder.mkdir()
    rows = []
    for i in range(ROWS):
        ids = torch.randint(0, 250, (20 + i,), generator=generator)
        mask = (torch.arange(len(ids)) >= 6).long()
        layers, raw, normed = capture(target, ids.tolist())
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)})
        if request.param == "speculators":
            states = torch.cat((layers, raw[:, None]), dim=1)
            save_file(
                {"hidden_states": states.contiguous(), "token_ids": ids},
                folder / f"hs_{i}.safetensors",
            )
            continue
        tensors = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_states": layers.flatten(1)[None].clone(),
            "target_last_hidden_states": normed[None].clone(),
        }
        part = folder / f"rows_{i // 10 * 10}-{i // 10 * 10 + 10}"
        part.mkdir(exist_ok=True)
        if request.param == "specforge":
            torch.save(tensors, part / f"data_{i}.ckpt")
        else:
            buffer = io.BytesIO()
            torch.save(tensors, buffer)
            (part / f"data_{i}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    text = folder
    if request.param == "speculators":
        import datasets

        text = tmp_path / "arrow"
        datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(text)
    return DataConfig(
        train=[str(text)],
        token_budget=90,
        hidden_states=str(folder),
        hidden_layer_ids=list(STORED),
        hidden_last="raw" if request.param == "speculators" else "normed",
    )


def open_cache(cfg: DataConfig, target: Target, tiny_target_dir: Path, **changes) -> HiddenCache:
    cfg = dataclasses.replace(cfg, **changes)
    examples, _ = load_examples(cfg.train, load_tokenizer(str(tiny_target_dir)), cfg)
    return HiddenCache(cfg, WANTED, examples, target)


def slot_of(split: bool) -> Slot:
    slot = Slot(
        90, len(WANTED), 64, dtype=torch.float32, device=torch.device("cpu"), with_last=True,
        split_fc=split,
    )  # fmt: skip
    slot.hidden.fill_(7.0)  # left over from a longer batch
    assert slot.last_hidden is not None
    slot.last_hidden.fill_(7.0)
    return slot


@pytest.mark.parametrize("split", [False, True])
def test_slots_hold_what_the_target_would_write(
    split: bool, stored: DataConfig, target: Target, tiny_target_dir: Path
) -> None:
    cache = open_cache(stored, target, tiny_target_dir)
    planner = BatchPlanner(
        cache._examples, stored, TrainConfig(max_anchors=8), BlockLayout(4), 1
    )  # fmt: skip
    loop = TargetForwardLoop(target, WANTED, None, {}, None, 1, cache)  # type: ignore[arg-type]
    seen = set()
    for batch_id in range(4):
        ticket = Ticket(planner.batch(batch_id), 0, batch_id, batch_id)
        cached, own = slot_of(split), slot_of(split)
        own.hidden.zero_()
        own.last_hidden.zero_()  # type: ignore[union-attr]
        loop._fill(cached, ticket)
        loop._forward(own, ticket)
        torch.testing.assert_close(cached.hidden, own.hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cached.last_hidden, own.last_hidden, rtol=1e-4, atol=1e-5)
        seen |= set(ticket.plan.doc_ids)
    assert len(seen) > 6


def test_what_is_declared_is_compared_with_the_target(
    stored: DataConfig, target: Target, tiny_target_dir: Path
) -> None:
    lines = open_cache(stored, target, tiny_target_dir).verify()
    assert lines[0].startswith("cache    layers as declared, 0.0% from") and "100%" in lines[1]
    other = "normed" if stored.hidden_last == "raw" else "raw"
    with pytest.raises(UserError, match=f"hidden_last: found {other}.*want {stored.hidden_last}"):
        open_cache(stored, target, tiny_target_dir, hidden_last=other).verify()
    for ids in ([2, 1, 4], [0, 1, 4]):
        cache = open_cache(stored, target, tiny_target_dir, hidden_layer_ids=ids)
        with pytest.raises(UserError, match="hidden_layer_ids: found layer 1 declared, but the fi"):
            cache.verify()
    assert len(open_cache(stored, target, tiny_target_dir, hidden_last="none").verify()) == 1


def test_settings_that_cannot_be_are_one_line(
    stored: DataConfig, target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    for changes, wanted in (
        ({"hidden_layer_ids": [1, 2]}, "data.hidden_layer_ids: found [1, 2], want all layers of"),
        (
            {"hidden_states": str(tmp_path / "none")},
            "data.hidden_states: found no hs_N.safetensors",
        ),
        ({"hidden_layer_ids": [1, 2, 3, 4]}, "want [tokens, 4 (data.hidden_layer_ids), 64"),
    ):
        with pytest.raises(UserError) as error:
            open_cache(stored, target, tiny_target_dir, **changes).verify()
        assert wanted in str(error.value) and "\n" not in str(error.value)
    examples, _ = load_examples(stored.train, load_tokenizer(str(tiny_target_dir)), stored)
    with pytest.raises(UserError, match="want layers before the last with data.hidden_states"):
        HiddenCache(dataclasses.replace(stored, hidden_layer_ids=[1, 5]), [1, 5], examples, target)


def files(cfg: DataConfig) -> list[Path]:
    return sorted(path for path in Path(cfg.hidden_states).rglob("*") if path.is_file())


def test_damaged_and_foreign_files_are_one_line(
    stored: DataConfig, target: Target, tiny_target_dir: Path
) -> None:
    cache = open_cache(stored, target, tiny_target_dir)
    by_number = [path for path in files(stored) if path.name.split(".")[0] in ("hs_0", "data_0")]
    other = [path for path in files(stored) if path.name.split(".")[0] in ("hs_1", "data_1")]
    (path,), whole = by_number, by_number[0].read_bytes()
    for content, wanted in (
        (whole[: len(whole) // 2], "cannot be read"),
        (b"", "cannot be read"),
        (other[0].read_bytes(), "found other tokens than"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=wanted) as error:
            cache.read(0)
        assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    path.write_bytes(whole)
    cache.read(0)


def test_states_that_are_not_finite_are_refused(
    stored: DataConfig, target: Target, tiny_target_dir: Path, monkeypatch
) -> None:
    cache = open_cache(stored, target, tiny_target_dir)
    name = "_read_ckpt" if cache._ckpts else "_read_safetensors"
    read = getattr(cache, name)

    def poisoned(number):
        path, ids, layers, last = read(number)
        layers = layers.clone()
        layers[3, 0, 5] = float("nan")
        return path, ids, layers, last

    monkeypatch.setattr(cache, name, poisoned)
    with pytest.raises(UserError, match="missing or non-finite states, want 20 finite rows"):
        cache.read(0)


def test_every_row_has_its_file(
    stored: DataConfig, target: Target, tiny_target_dir: Path, tiny_jsonl: Callable[..., Path]
) -> None:
    examples, _ = load_examples(stored.train, load_tokenizer(str(tiny_target_dir)), stored)
    rows = [
        {"input_ids": e.input_ids.tolist(), "loss_mask": e.loss_mask.tolist()} for e in examples
    ]
    open_cache(stored, target, tiny_target_dir, train=[str(tiny_jsonl(rows))]).verify()
    text = tiny_jsonl([*rows, rows[0]])
    with pytest.raises(UserError, match=rf"hidden_states: found .*{text}:13, as for every row$"):
        open_cache(stored, target, tiny_target_dir, train=[str(text)])


one_format = pytest.mark.parametrize("stored", ["specforge"], indirect=True)


def rewrite(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Changes tensors of a .ckpt file, or leaves them out."""
    tensors = torch.load(path, weights_only=True)
    for name, change in changes.items():
        value = tensors.pop(name)
        if change is not None:
            tensors[name] = change(value)
    torch.save(tensors, path)


@one_format
def test_last_states_that_are_declared_are_looked_for_before_training(
    stored: DataConfig, target: Target, tiny_target_dir: Path
) -> None:
    for path in files(stored):
        rewrite(path, target_last_hidden_states=None)
    with pytest.raises(UserError, match="hidden_last: found normed, but no last states for .*_0.c"):
        open_cache(stored, target, tiny_target_dir).verify()
    assert len(open_cache(stored, target, tiny_target_dir, hidden_last="none").verify()) == 1


@one_format
def test_float8_states_are_read(stored: DataConfig, target: Target, tiny_target_dir: Path) -> None:
    for path in files(stored):
        rewrite(
            path,
            hidden_states=lambda states: states.to(torch.float8_e4m3fn),
            target_last_hidden_states=lambda states: states.to(torch.float8_e4m3fn),
        )
    lines = open_cache(stored, target, tiny_target_dir).verify()
    assert lines[0].startswith("cache    layers as declared, ") and len(lines) == 2


@one_format
def test_masks_of_other_dtypes(stored: DataConfig, tiny_target_dir: Path) -> None:
    tokenizer, path = load_tokenizer(str(tiny_target_dir)), files(stored)[0]
    for dtype in (torch.float32, torch.bool):
        rewrite(path, loss_mask=lambda mask, dtype=dtype: mask.to(dtype))
        examples, _ = load_examples(stored.train, tokenizer, stored)
        assert examples[0].loss_mask.tolist() == [0] * 6 + [1] * 14
    for value, shown in ((float("nan"), "NaN"), (0.5, "0.5"), (2.0, "2.0")):
        rewrite(path, loss_mask=lambda mask, value=value: mask.float().index_fill(0, SEVEN, value))
        with pytest.raises(UserError, match=rf"{path}: loss_mask\[7\]: found {shown}, want an int"):
            load_examples(stored.train, tokenizer, stored)


@one_format
def test_a_bad_file_that_training_comes_to_is_one_line(
    stored: DataConfig, tiny_target_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    bad = files(stored)[7]
    rewrite(bad, hidden_states=lambda states: states.index_fill(1, SEVEN, float("nan")))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
model: {{target: {tiny_target_dir}, dtype: float32, target_layer_ids: {WANTED}}}
drafter: {{num_layers: 1, block_size: 4}}
data: {{train: {stored.train}, token_budget: 90, hidden_states: {stored.hidden_states},
        hidden_layer_ids: {STORED}, hidden_last: normed}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: 6, max_anchors: 12}}
log: {{dir: {tmp_path}, name: bad}}
"""
    )
    assert run_command(lambda: train.main(["--config", str(config)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {bad}: found missing or non-finite states")


def test_a_run_from_stored_states(
    stored: DataConfig,
    tiny_target_dir: Path,
    tmp_path: Path,
    tiny_jsonl: Callable[..., Path],
    monkeypatch,
    capsys,
) -> None:
    heldout = tiny_jsonl(n=3, name="heldout.jsonl")
    common = f"""
model: {{target: {tiny_target_dir}, dtype: float32, target_layer_ids: {WANTED}}}
drafter: {{num_layers: 2, block_size: 4}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: 6, lr: 0.003, max_anchors: 12, metrics_every: 1, kl_weight: 0.5}}
log: {{dir: {tmp_path}, every: 1}}
"""
    text = f"train: [{stored.train[0]}], eval: [{heldout}], token_budget: 200"
    offline = (
        f"hidden_states: {stored.hidden_states}, hidden_layer_ids: {STORED}, "
        f"hidden_last: {stored.hidden_last}"
    )
    losses = {}
    for name, data in (("online", text), ("offline", f"{text}, {offline}")):
        config = tmp_path / f"{name}.yaml"
        config.write_text(f"data: {{{data}}}\n{common}")
        flags = ["--config", str(config), f"--log.name={name}"]
        assert run_command(lambda: train.main(flags)) == 0  # noqa: B023
        logged = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        losses[name] = [row["loss"] for row in logged if "loss" in row]
    assert losses["offline"] == pytest.approx(losses["online"], rel=1e-4)
    assert "cache    layers as declared" in capsys.readouterr().out
