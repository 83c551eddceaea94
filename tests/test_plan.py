"""--plan: memory and speed from a configuration, without weights, text or a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_ext import plan as plan_module
from dflash_ext import target_shape, train
from dflash_ext.command import run_command
from dflash_ext.config import Config, ModelConfig, UserError, load_config
from dflash_ext.config_cli import PROJECT_ROOT
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.hs_queue import Slot
from dflash_ext.plan import GIB, Plan
from dflash_ext.target_shape import KNOWN_CONFIGS, read_target_shape

RECIPES = sorted((PROJECT_ROOT / "configs").glob("*.yaml"))
BIG = PROJECT_ROOT / "configs" / "qwen3_6_27b_8gpu.yaml"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(train, "Pipeline", refuse)


def planned(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = run_command(lambda: train.main(["--config", str(path), "--plan", *flags]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_there_is_a_recipe_for_each_size() -> None:
    names = {path.stem for path in RECIPES}
    big = {f"qwen3_{version}_27b_{n}gpu" for version in (5, 6) for n in (2, 8)}
    assert names >= big | {"smollm2_cpu", "smollm2_gpu", "qwen3_8b_1gpu", "qwen3_8b_2gpu"}
    cfg = load_config(BIG)
    assert (len(cfg.topology.targets), len(cfg.topology.drafters)) == (5, 3)
    assert cfg.drafter.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert cfg.drafter.sliding_window == 2048


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_planned_fits_and_is_balanced(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = planned(path, capsys)
    assert (code, err) == (0, "")
    cfg = load_config(path)
    devices = {*cfg.topology.targets, *cfg.topology.drafters}
    memory = [line for line in out.splitlines() if line.startswith("memory ")]
    assert all(any(re.search(rf"{device}\b", line) for line in memory) for device in devices)
    assert re.search(r"^speed    [\d,]+ tokens/s expected", out, flags=re.MULTILINE)
    assert "nothing was loaded" in out
    if not {*cfg.topology.targets} & {*cfg.topology.drafters}:
        waits = re.search(r"the \w+ wait (\d+)% of the time", out)
        assert waits is not None and int(waits[1]) <= 5
        assert all(" free " in line for line in memory)
        assert Plan(cfg).balance().slots_needed() <= cfg.topology.slots_per_drafter


def test_parts_of_the_27b_plan() -> None:
    plan = Plan(load_config(BIG))
    on_target, on_drafter = plan.memory["cuda:0"], plan.memory["cuda:7"]
    layers = 48 * (10240 + 6144 + 96 + 6144) + 16 * (12288 + 2048 + 6144) + 64 * 3 * 17408
    weights = sum(plan.target.layer_weights)
    assert weights == 5120 * layers
    assert on_target["target weights"] == pytest.approx(2 * (weights + 2 * 248320 * 5120), rel=1e-3)
    assert on_drafter["slots"] == 4 * 49152 * 5 * 5120 * 2
    assert on_drafter["embedding and head"] == 2 * 248320 * 5120 * 2
    parameters = plan.spec.num_parameters
    assert parameters == pytest.approx(1.73e9, rel=1e-3)
    names = ("drafter weights", "masters", "gradients", "moments")
    assert [on_drafter[name] / parameters for name in names] == [2, 4, 4, 8]
    assert "drafter weights" not in on_target and "target weights" not in on_drafter


def test_against_what_was_measured() -> None:
    """benchmarks/results/step_h200_202611.md: 27b, 49,152 tokens in texts of 3072."""
    cfg = load_config(BIG)
    cfg.data.max_length, cfg.drafter.layer_types, cfg.drafter.sliding_window = 3072, None, None
    for anchors, seconds in ((8192, 3.151), (1024, 0.463)):
        cfg.train.max_anchors = anchors
        plan = Plan(cfg)
        balance = plan.balance()
        found = balance.batch_s + anchors * balance.anchor_s
        assert found == pytest.approx(seconds, rel=0.15)
    parts = plan.memory["cuda:7"]
    held = sum(parts.values()) - parts["CUDA and libraries"] - parts["slots"] * 3 // 4  # it had one
    held -= parts["sums of gradients"]  # there was one drafter
    assert 1.0 <= held / (47.8 * GIB) <= 1.1


def test_a_gpu_too_small_is_refused_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = planned(BIG, capsys, "--topology.gpu_memory_gib=57")
    assert code == 2 and "free -1.8" in out
    assert re.fullmatch(
        r"error: topology: cuda:0: found a need of 58\.8 GiB \(most of it: target weights 50\.1, "
        r".*\), want at most 57\.0 GiB: lower data\.token_budget, spread the target .*\n",
        err,
    )
    assert "slots_per_drafter" not in err  # none is on that GPU
    few = ("--topology.gpu_memory_gib=60", "--topology.slots_per_drafter=8")
    err = planned(BIG, capsys, *few)[2]
    assert "cuda:5: " in err and "train.anchor_group or slots_per_drafter, or raise" in err


SIZES = ("intermediate_size", "num_attention_heads", "head_dim")


@pytest.mark.parametrize(("size", "value"), [*zip(SIZES, (10**12, 10**9, 10**18), strict=True)])
@pytest.mark.parametrize("path", [BIG, PROJECT_ROOT / "configs" / "smollm2_cpu.yaml"])
def test_a_drafter_that_no_memory_holds_is_refused_with_numbers(
    path: Path, size: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ["--drafter.num_key_value_heads=1"] if size == "num_attention_heads" else []
    code, _, err = planned(path, capsys, f"--drafter.{size}={value}", *heads)
    assert code == 2 and err.count("\n") == 1
    assert re.match(rf"error: drafter: found .*\b{size} {value}\b.* parameters, whose ", err)
    device = "cuda:5" if path == BIG else "cpu"
    assert re.search(rf"need [\d,.]+ GiB on {device}, want at most [\d,.]+ GiB: lower these", err)


def test_a_drafters_parameters_are_counted_without_it() -> None:
    for path in RECIPES:
        for split in (False, True):
            cfg = load_config(path)
            cfg.drafter.split_fc = split
            spec = Plan(cfg).spec
            with torch.device("meta"):
                model = DFlashDraftModel(spec)
            assert spec.num_parameters == sum(p.numel() for p in model.parameters())


def test_no_more_anchors_are_planned_than_a_batch_has_tokens() -> None:
    cfg = load_config(BIG)
    cfg.train.max_anchors, cfg.train.anchor_group = cfg.data.token_budget, None
    most = Plan(cfg)
    cfg.train.max_anchors = 10**6
    more = Plan(cfg)
    assert more.memory == most.memory and more.balance() == most.balance()
    assert f" tokens and {cfg.data.token_budget} anchors each" in "\n".join(more.lines())


def with_gpus(monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
    """Eight GPUs of 139 GiB, the fifth (a target's) with `free_gib` left by someone else."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda index: (int((free_gib if index == 4 else 139) * GIB), 139 * GIB),
    )


@pytest.mark.parametrize(("configured", "free_gib"), [(50, 139), (139, 50)])
def test_a_run_that_cannot_fit_ends_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    configured: float,
    free_gib: float,
) -> None:
    with_gpus(monkeypatch, free_gib)
    line = ["--config", str(BIG), f"--log.dir={tmp_path}"]
    line.append(f"--topology.gpu_memory_gib={configured}")
    assert run_command(lambda: train.main(line)) == 2
    captured = capsys.readouterr()
    device = "cuda:0" if configured == 50 else "cuda:4"
    assert f"topology: {device}: found a need of 58.8 GiB" in captured.err
    assert "want at most 50.0 GiB" in captured.err
    wanted = rf"^memory .*{device}.*: target weights 50\.10, .* of 50\.0, free -8\.8$"
    assert re.search(wanted, captured.out, flags=re.MULTILINE)
    assert "moments 12.89" in captured.out


def test_a_run_that_fits_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with_gpus(monkeypatch, 139)

    class Started(Exception):
        pass

    def start(*args: object) -> None:
        raise Started

    monkeypatch.setattr(train, "Pipeline", start)
    flags = ["--config", str(BIG), f"--log.dir={tmp_path}"]
    with pytest.raises(Started):
        train.main(flags)
    out = capsys.readouterr().out
    assert len(re.findall(r"free [78]\d\.\d$", out, flags=re.MULTILINE)) == 2
    assert "slots_per_drafter" not in out
    with pytest.raises(Started):
        train.main([*flags, "--topology.slots_per_drafter=2"])
    assert "warning  topology.slots_per_drafter: found 2, want 4, " in capsys.readouterr().out


def test_a_spread_target_takes_a_part_of_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = planned(BIG, capsys, "--topology.targets=[0+1, 2+3, 4]")
    assert code == 0
    assert re.search(r"^memory   cuda:0 cuda:1 cuda:2 cuda:3: target weights 25\.0", out, re.M)
    assert re.search(r"^memory   cuda:4: target weights 50\.10", out, re.M)
    whole = Plan(load_config(BIG))
    spread = load_config(BIG)
    spread.topology.targets = ["cuda:0+cuda:1+cuda:2"]
    parts = [Plan(spread).memory[f"cuda:{i}"]["target weights"] for i in range(3)]
    assert sum(parts) == pytest.approx(whole.memory["cuda:0"]["target weights"], rel=1e-5)
    assert max(parts) < 1.05 * min(parts)


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_a_folder_with_a_config_alone_gives_the_same_shape(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_CONFIGS[name]))
    known, read = (read_target_shape(ModelConfig(target=t)) for t in (name, str(tmp_path)))
    assert known.source != read.source
    assert (known.info, known.layer_weights) == (read.info, read.layer_weights)
    assert known.parameters == read.parameters


def test_a_config_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(target_shape.AutoConfig, "from_pretrained", unreachable)
    code, _, err = planned(BIG, capsys, "--model.target=someone/else")
    assert code == 2
    assert "model.target: cannot read the config of 'someone/else' (no route to the hub)" in err


def test_experts_count_by_the_share_that_a_token_meets(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 8},
        **{"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
        vocab_size=100,
    )
    config.save_pretrained(tmp_path)
    shape = read_target_shape(ModelConfig(target=str(tmp_path)))
    attention, router, experts = 32 * (32 + 16 + 16 + 32), 32 * 8, 2 * 3 * 32 * 8
    assert shape.layer_weights == (attention + router + experts,) * 2


def tiny(target: Path, **train_fields: object) -> Config:
    cfg = Config()
    cfg.model.target = str(target)
    cfg.drafter.num_layers, cfg.drafter.block_size = 2, 4
    cfg.data.max_length, cfg.data.token_budget = 64, 256
    cfg.topology.targets, cfg.topology.drafters = ["cuda:0"], ["cuda:1"]
    for name, value in train_fields.items():
        setattr(cfg.train, name, value)
    return cfg


def test_sizes_are_those_of_the_real_buffers(tiny_target_dir: Path) -> None:
    plan = Plan(tiny(tiny_target_dir, kl_weight=1.0))
    slot = Slot(
        256,
        2,
        plan.spec.hidden_size,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        with_last=True,
    )
    assert slot.last_hidden is not None
    assert plan.memory["cuda:1"]["slots"] == 2 * (slot.hidden.nbytes + slot.last_hidden.nbytes)
    model = DFlashDraftModel(plan.spec)
    assert plan.spec.num_parameters == sum(p.numel() for p in model.parameters())


def test_settings_that_take_or_save_memory(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(name: str, **fields: object) -> int:
        return Plan(tiny(tiny_target_dir, **fields)).memory["cuda:1"][name]

    activations = "activations of a group"
    assert part(activations, anchor_group=64) == part(activations) // 4  # of 256 tokens
    assert part(activations, recompute=True) < part(activations)
    rows = {"loss_chunk_rows": 2048}
    assert part("loss scratch", kl_weight=1.0, **rows) > part("loss scratch", **rows)
    logits = Plan(tiny(tiny_target_dir)).target.info.vocab_size * 2
    plain = part("loss scratch")
    monkeypatch.setattr(plan_module, "CHUNK_BYTES", 1500 * logits)  # less than two of 1024 slots
    assert part("loss scratch", kl_weight=1.0) == plain + (1500 - 1024) * logits
    assert part("moments", optimizer="muon") == part("moments") // 2
    shared = tiny(tiny_target_dir)
    shared.topology.drafters = ["cuda:0", "cuda:0"]
    both = Plan(shared).memory
    assert list(both) == ["cuda:0"] and "embedding and head" not in both["cuda:0"]
    assert both["cuda:0"]["masters"] == 2 * part("masters")
    assert both["cuda:0"]["sums of gradients"] == part("gradients")  # of a few MiB
    assert "sums of gradients" not in Plan(tiny(tiny_target_dir)).memory["cuda:1"]


def test_the_proposed_anchors_balance() -> None:
    cfg = load_config(BIG)
    for anchors in (64, 20000):
        cfg.train.max_anchors = anchors
        cfg.train.max_anchors = Plan(cfg).balance().balanced_anchors() or 0
        balance = Plan(cfg).balance()
        targets, drafters = balance.sides
        assert drafters == pytest.approx(targets, rel=0.02)
        assert balance.whole == min(targets, drafters)


def test_the_slower_side_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the targets are the slower side" in planned(BIG, capsys, "--train.max_anchors=512")[1]
    many = planned(BIG, capsys, "--train.max_anchors=30000")[1]
    assert "the drafters are the slower side, the targets wait " in many


def test_too_few_slots_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    few = planned(BIG, capsys, "--topology.slots_per_drafter=2")[1]
    assert "topology.slots_per_drafter 4 instead of 2 would end that" in few
    speed = re.search(r"^speed    ([\d,]+) .*targets alone ([\d,]+)", few, flags=re.MULTILINE)
    assert speed is not None
    held_up, alone = (float(number.replace(",", "")) for number in speed.groups())
    assert held_up == pytest.approx(0.755 * alone, rel=0.01)


def test_the_recommended_layout_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = PROJECT_ROOT / "configs" / "qwen3_5_27b_8gpu.yaml"
    out = planned(path, capsys, "--topology.targets=[0,1]", "--topology.drafters=[2,3,4,5,6,7]")[1]
    sides = re.search(r"targets alone ([\d,]+), drafters alone ([\d,]+)$", out, flags=re.MULTILINE)
    assert sides is not None
    targets, drafters = (float(side.replace(",", "")) for side in sides.groups())
    assert drafters > 5 * targets
    balance = out.partition("balance  ")[2]
    assert balance.startswith("the targets are the slower side, the drafters wait 80% of the time")
    assert "or targets to drafters as 1.7:1 (of 8: 5 and 3) would balance it" in balance
    anchors = re.search(r"train\.max_anchors (\d+) or", balance)
    assert anchors is not None
    flags = ("--topology.targets=[0,1]", "--topology.drafters=[2,3,4,5,6,7]")
    again = planned(path, capsys, *flags, f"--train.max_anchors={anchors[1]}")[1]
    waits = re.search(r"wait (\d+)% of the time", again)
    assert waits is not None and int(waits[1]) <= 1


def test_one_device_for_both_is_the_harmonic_bound() -> None:
    plan = Plan(load_config(PROJECT_ROOT / "configs" / "qwen3_8b_1gpu.yaml"))
    balance = plan.balance()
    targets, drafters = balance.sides
    assert balance.whole == pytest.approx(1 / (1 / targets + 1 / drafters))


def test_cpus_beside_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = planned(BIG, capsys, "--topology.targets=[cpu]")
    assert code == 2 and "want all on cpu or all on GPUs" in err


def test_unset_memory_is_that_of_the_gpu_if_there_is_one(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(tiny(tiny_target_dir))
    monkeypatch.setattr(plan_module.torch.cuda, "device_count", lambda: 0)
    assert plan.limit("cuda:1") is None
    plan.check_memory()

    class Properties:
        total_memory = GIB

    monkeypatch.setattr(plan_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(plan_module.torch.cuda, "get_device_properties", lambda index: Properties())
    with pytest.raises(UserError, match=r"cuda:0: found a need of 2\.0 GiB .*most 1\.0 GiB"):
        plan.check_memory()
