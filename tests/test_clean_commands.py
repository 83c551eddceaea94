"""Mistakes that must cost one line and no work: output files, devices, caches, the hub's noise."""

import errno
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_drafter

from benchmarks import run as benchmark
from dflash_ext import evaluate, plot, regenerate, train
from dflash_ext.command import check_output_file, run_command
from dflash_ext.config import UserError
from dflash_ext.data.readers import load_dataset_shard
from dflash_ext.greedy_text import GreedyTextCache
from dflash_ext.target import AutoConfig, AutoTokenizer, load_target, load_tokenizer


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


def no_work(*args: object, **kwargs: object) -> None:
    raise AssertionError("began to work")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and captured.out == ""
    return line


@pytest.mark.parametrize("out", [".", "no/such/folder/x.json"])
def test_evaluate_refuses_its_output_first(out, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(evaluate, "evaluate", no_work)
    options = ["--drafter", "x", "--target", "x", "--data", "x", "--json", str(tmp_path / out)]
    assert evaluate.main(options) == 2
    assert "--json: " in one_line(capsys)


def test_plot_refuses_its_output_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plot, "plot_runs", no_work)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    arguments = ["--run", str(tmp_path), "--out"]
    for out in (tmp_path, tmp_path / "metrics.jsonl" / "x.png"):
        assert run_command(lambda out=out: plot.main([*arguments, str(out)])) == 2
        assert "--out: " in one_line(capsys)
    with pytest.raises(AssertionError, match="began to work"):  # a folder that can be made is fine
        plot.main([*arguments, str(tmp_path / "new" / "folder" / "x.png")])


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "loss": "x"}', '{"step": 1e400}', "[" * 10**5, "[]", '{"step": 1, "acc": [1]}'],
    ids=lambda line: line[:20],
)
def test_plot_names_a_damaged_row(line, tmp_path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    arguments = ["--run", str(tmp_path), "--out", str(tmp_path / "x.png")]
    assert run_command(lambda: plot.main(arguments)) == 2
    assert "metrics.jsonl" in one_line(capsys)


def test_plot_names_a_file_of_bytes(tmp_path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00\n")
    arguments = ["--run", str(tmp_path), "--out", str(tmp_path / "x.png")]
    assert run_command(lambda: plot.main(arguments)) == 2
    assert "metrics.jsonl:1: found " in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nothing"],
        ["--device", "gpu"],
        ["--device", "cuda:99"],
        ["--device", "meta"],
        ["--json", "."],
        ["--json", "no/such/x.json"],
        ["--what"],
    ],
    ids=" ".join,
)
def test_benchmarks_refuse_first(arguments, monkeypatch, capsys) -> None:
    monkeypatch.setattr(benchmark, "facts", no_work)
    assert run_command(lambda: benchmark.main(arguments)) == 2
    assert arguments[0] in one_line(capsys)


def test_an_output_file_that_can_be_written(tmp_path) -> None:
    check_output_file("--x", tmp_path / "new.json")
    (tmp_path / "old.json").write_text("")
    check_output_file("--x", tmp_path / "old.json")
    with pytest.raises(UserError, match="--x: found the folder"):
        check_output_file("--x", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/stdout"), Path("/dev/new")):
        with pytest.raises(UserError, match="a device or a pipe, want a file"):
            check_output_file("--x", path)


def test_an_output_does_not_replace_its_input(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(evaluate, "evaluate", no_work)
    text = tmp_path / "x.jsonl"
    text.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi?"}]}) + "\n")
    before = text.read_text()
    options = ["--drafter", "x", "--target", "x", "--data", str(text), "--json", str(text)]
    assert evaluate.main(options) == 2
    assert "which is --data, want another file" in one_line(capsys)
    assert regenerate.main(["--target", "x", "--prompts", str(text), "--out", str(text)]) == 2
    assert "which is --prompts, want another file" in one_line(capsys)
    assert text.read_text() == before


@pytest.mark.parametrize("option", ["drafter", "target", "data"])
def test_evaluate_writes_into_no_folder_that_it_reads(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "evaluate", no_work)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    weights.symlink_to(tmp_path / "blob")  # as in the hub's cache
    (tmp_path / "blob").write_text("weights")
    inputs = {"drafter": "x", "target": "x", "data": "x"} | {option: str(tmp_path / "link")}
    options = [word for name, value in inputs.items() for word in (f"--{name}", value)]
    for out in (weights, tmp_path / "link" / "new.json", tmp_path / "in" / "deep" / "new.json"):
        assert evaluate.main([*options, "--json", str(out)]) == 2
        assert f"{out}, which is in the folder of --{option}, want" in one_line(capsys)
    with pytest.raises(AssertionError, match="began to work"):  # beside it is fine
        beside = [*options, "--json", str(tmp_path / "new.json")]
        evaluate._run(evaluate._parser().parse_args(beside))
    assert weights.read_text() == "weights"


def test_regenerate_refuses_devices_and_pipes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(regenerate, "read_prompts", no_work)
    os.mkfifo(tmp_path / "pipe")
    for out in (Path("/dev/full"), tmp_path / "pipe"):
        options = ["--server", "http://x", "--prompts", "x", "--out", str(out)]
        assert regenerate.main(options) == 2
        assert f"--out: found {out}, a device or a pipe, want a file" in one_line(capsys)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e9", str(10**30)])
def test_numbers_of_regenerate(value, capsys) -> None:
    options = ["--server", "http://x", "--prompts", "x", "--out", "x", "--timeout", value]
    assert regenerate.main(options) == 2
    assert f"--timeout: found '{value}', want an integer from 1 to" in one_line(capsys)


def test_regenerate_refuses_its_device_first(capsys) -> None:
    options = ["--target", "x", "--prompts", "x", "--out", "x", "--device", "gpu"]
    assert regenerate.main(options) == 2
    assert "--device: found 'gpu'" in one_line(capsys)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EBADF])
def test_a_full_or_closed_output_is_one_line(number, capsys) -> None:
    def command() -> None:
        raise OSError(number, "trouble")  # as print() does: without a name

    assert run_command(command) == 1
    assert one_line(capsys) == "error: output: trouble, want room for it, or a reader"


def test_accepting_changed_data_needs_a_resume(capsys) -> None:
    options = ["--accept_changed_data", "--topology.targets=cpu", "--topology.drafters=cpu"]
    assert run_command(lambda: train.main(options)) == 2
    assert "--accept_changed_data: found without --resume, want both" in one_line(capsys)


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: "",
        lambda good: good[:-9],
        lambda good: "[]",
        lambda good: json.dumps(json.loads(good) | {"tokens": []}),
        lambda good: json.dumps(json.loads(good) | {"tokens": 5}),
        lambda good: json.dumps(json.loads(good) | {"tokens": ["x"] * 9}),
        lambda good: json.dumps(json.loads(good) | {"tokens": [10**9] * 9}),
        lambda good: json.dumps(json.loads(good) | {"tokens": [True] * 9}),
        lambda good: json.dumps(json.loads(good) | {"prompt": [1]}),
        lambda good: "[" * 10**5,
    ],
)
def test_a_damaged_cached_text_is_made_again(
    damage: Callable[[str], str], bench: tiny_drafter.Bench, tmp_path: Path
) -> None:
    cache = GreedyTextCache(tmp_path, bench.target.model, ())
    prompt = tiny_drafter.PROMPTS[0]
    answer = cache.get(prompt, 6)
    path = cache.path(prompt)
    good = path.read_text()
    path.write_text(damage(good))
    assert cache.get(prompt, 6) == answer
    assert path.read_text() == good


def test_the_hub_retries_in_silence(monkeypatch, capsys, caplog) -> None:
    """Its warning for every attempt would stand before our one line."""

    def unreachable(*args: object, **kwargs: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    for load in (load_tokenizer, lambda name: load_target(name, dtype="float32", device="cpu")):
        assert run_command(lambda load=load: load("some/model")) == 2
        assert "error: model.target: cannot load the " in one_line(capsys)
    datasets = SimpleNamespace(load_dataset=unreachable)
    monkeypatch.setattr("dflash_ext.data.readers.import_module", lambda name: datasets)
    assert run_command(lambda: load_dataset_shard("some/text", None, None)) == 2
    assert "error: hf:some/text: cannot be loaded" in one_line(capsys)
    assert not caplog.records
    with pytest.raises(OSError, match="connect"):
        unreachable()
    assert len(caplog.records) == 1  # outside of our loading it is as it was


def test_a_drafter_is_no_target(bench, tmp_path, capsys) -> None:
    """transformers would print a table of the tensors that it misses."""
    bench.drafter.save_pretrained(tmp_path / "x")
    reports: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = reports.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        load = partial(load_target, str(tmp_path / "x"), dtype="float32", device="cpu")
        assert run_command(load) == 2
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert "found no lm_head.weight and 1 others, want all tensors of the model" in one_line(capsys)
    assert reports == []


def test_a_finished_file_says_which_settings_differ_before_anything_is_loaded(
    tiny_target_dir: Path, tiny_jsonl: Callable[..., Path], tmp_path: Path, monkeypatch, capsys
) -> None:
    out, source = tmp_path / "out.jsonl", ["--target", str(tiny_target_dir)]
    files = ["--prompts", str(tiny_jsonl(n=2)), "--out", str(out), "--max_new_tokens"]
    assert regenerate.main([*source, *files, "6"]) == 0
    content = out.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(regenerate, "_generator", no_work)
    assert regenerate.main([*source, *files, "7", "--keep_truncated"]) == 2
    assert capsys.readouterr().err == (
        f"error: {out}.settings.yaml: found max_new_tokens 6, this command has 7; found "
        "keep_truncated False, this command has True; want the same or a new --out\n"
    )
    server = ["--server", "http://127.0.0.1:9"]
    assert regenerate.main([*server, *files, "6"]) == 2
    assert "found target " in capsys.readouterr().err
    assert regenerate.main([*source, *files, "6"]) == 0
    assert out.read_bytes() == content
    Path(f"{out}.settings.yaml").write_text("{model: m, max_new_tokens: 6, keep_truncated: false}")
    assert regenerate.main([*server, *files, "6"]) == 0  # its model is not asked for
    capsys.readouterr()
    assert regenerate.main([*server, "--model", "n", *files, "6"]) == 2
    assert "found model 'm', this command has 'n'; want" in capsys.readouterr().err
