"""The evaluate command and the greedy texts behind it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_drafter
import torch
from tiny_run import TinyRun

from dflash_ext import evaluate, greedy_text
from dflash_ext.data.corpus import Example
from dflash_ext.drafter import loop
from dflash_ext.greedy_text import GreedyTextCache, greedy_tokens, weights_fingerprint
from dflash_ext.target import load_target, load_tokenizer

PROMPT = tiny_drafter.PROMPTS[0]
LIMIT = 30


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


@pytest.fixture(scope="module")
def export(bench: tiny_drafter.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    bench.drafter.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def row(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def no_decoding(*args: object) -> None:
    raise AssertionError("decoded again")


def test_greedy_tokens_equal_argmax_without_a_cache(bench: tiny_drafter.Bench) -> None:
    model, ids = bench.target.model, list(PROMPT)
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    answer = ids[len(PROMPT) :]
    assert list(greedy_tokens(model, PROMPT, 10, ())) == answer
    stop = answer[6]
    assert list(greedy_tokens(model, PROMPT, 10, {stop})) == answer[: answer.index(stop) + 1]


def test_stored_texts_serve_lower_limits(
    bench: tiny_drafter.Bench, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = bench.texts[0][len(PROMPT) :]
    texts = GreedyTextCache(cache, bench.target.model, ())
    assert texts.get(PROMPT, 12) == answer[:12]
    assert texts.get(PROMPT, 20) == answer[:20]  # longer than what was stored
    with monkeypatch.context() as patch:
        patch.setattr(greedy_text, "greedy_tokens", no_decoding)
        assert texts.get(PROMPT, 20) == answer[:20]
        assert texts.get(PROMPT, 3) == answer[:3]
        with pytest.raises(AssertionError, match="decoded again"):
            texts.get(PROMPT, 21)
        with pytest.raises(AssertionError, match="decoded again"):
            texts.get(PROMPT[1:], 3)
        with pytest.raises(AssertionError, match="decoded again"):
            GreedyTextCache(cache, bench.target.model, answer[1:2]).get(PROMPT, 3)
    ended = GreedyTextCache(cache, bench.target.model, answer[1:2])
    assert ended.get(PROMPT, 20) == answer[:2]
    monkeypatch.setattr(greedy_text, "greedy_tokens", no_decoding)
    assert ended.get(PROMPT, 100) == answer[:2]
    assert not list(cache.rglob("*.tmp"))


def test_fingerprint_knows_the_weights_not_the_place(
    bench: tiny_drafter.Bench, tmp_path: Path
) -> None:
    def fingerprint(folder: Path, dtype: str = "float32") -> str:
        return weights_fingerprint(load_target(str(folder), dtype=dtype, device="cpu").model)

    copied = shutil.copytree(bench.folder, tmp_path / "copy")
    first = fingerprint(bench.folder)
    assert fingerprint(copied) == first
    assert fingerprint(copied, "bfloat16") != first
    model = load_target(str(copied), dtype="float32", device="cpu").model
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 7] += 1e-6
    assert weights_fingerprint(model) != first


def test_given_text_ends_where_decoding_would() -> None:
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1], np.uint8)
    example = Example(np.array([5, 6, 7, 9, 8, 5, 1, 2, 3, 4], np.int32), mask, "f:1")

    def answers(stops: list[int], limit: int | None) -> list[tuple[int, int, int]]:
        text = evaluate.given_text(example, stops, limit)
        return [(a.first, a.last, min(a.limit, 99)) for a in text.answers]

    assert answers([9], None) == [(2, 3, 99), (6, 9, 10)]  # ended by 9, cut off at the end
    assert answers([], 2) == [(2, 3, 4), (6, 7, 8)]
    assert answers([9], 3) == [(2, 3, 5), (6, 8, 9)]


def test_text_without_a_prompt(
    bench: tiny_drafter.Bench, export: Path, tiny_jsonl: Callable[..., Path]
) -> None:
    """Its first token is the prompt: no target predicts that one."""
    data = tiny_jsonl([{"input_ids": [65, 66, 67, 68], "loss_mask": [1, 0, 1, 1]}])
    text = evaluate.evaluate(export, str(bench.folder), data, trust_text=True)
    assert [sum(lengths) for lengths in text["per_prompt"]] == [1]
    data = tiny_jsonl([row([], [65, 66, 67])])
    text = evaluate.evaluate(export, str(bench.folder), data, trust_text=True)
    assert [sum(lengths) for lengths in text["per_prompt"]] == [1]
    made = evaluate.evaluate(export, str(bench.folder), data, max_new_tokens=5)
    assert [sum(lengths) for lengths in made["per_prompt"]] == [4]


def test_rows_are_cut_at_the_targets_context(
    bench: tiny_drafter.Bench, export: Path, tiny_jsonl: Callable[..., Path], capsys
) -> None:
    long = row([1] * 550, [2] * 50)  # of 512 positions
    command = ["--drafter", export, "--target", bench.folder, "--max_new_tokens", 2, "--data"]
    assert evaluate.main(list(map(str, [*command, tiny_jsonl([long])]))) == 2
    assert "answer within the target's context, 512 tokens\n" in capsys.readouterr().err
    data = tiny_jsonl([long, row(tiny_drafter.PROMPTS[0], [1, 2, 3])])
    assert evaluate.main(list(map(str, [*command, data]))) == 0
    assert "1 rows truncated at the target's context\n" in capsys.readouterr().err


def test_command(
    bench: tiny_drafter.Bench,
    export: Path,
    tiny_jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tiny_jsonl([row(prompt, [1, 2, 3]) for prompt in tiny_drafter.PROMPTS])
    out = tmp_path / "out.json"
    command = ["--drafter", export, "--target", bench.folder, "--data", data, "--json", out]
    command += ["--max_new_tokens", LIMIT]
    assert evaluate.main(list(map(str, command))) == 0
    result = json.loads(out.read_text())

    prompts, k = len(tiny_drafter.PROMPTS), bench.drafter.spec.block_size
    assert [sum(lengths) for lengths in result["per_prompt"]] == [LIMIT - 1] * prompts
    flat = [n for lengths in result["per_prompt"] for n in lengths]
    assert result["histogram"] == [flat.count(n) for n in range(1, k + 1)]
    assert result["accept_len_pooled"] == pytest.approx(sum(flat) / len(flat))
    assert result["accept_len"] > 1.3  # it was trained on this very text
    assert list(result["ddtree"]) == ["16", "64", "256"]
    assert result["accept_len"] < result["ddtree"]["64"] <= result["ddtree"]["256"] <= k
    assert result["not_argmax_share"] == 0
    acc = result["acc_k"]
    assert len(acc) == k - 1 and all(0 < a < 1 for a in acc) and acc[0] > acc[-1]
    assert f"accept_len {result['accept_len']:.3f}" in capsys.readouterr().out

    # The greedy texts are kept, and --trust_text on them gives the same figures.
    monkeypatch.setattr(greedy_text, "greedy_tokens", no_decoding)
    assert evaluate.main(list(map(str, command))) == 0
    assert json.loads(out.read_text()) == result
    answers = [t[len(p) :][:LIMIT] for p, t in zip(tiny_drafter.PROMPTS, bench.texts, strict=True)]
    rows = [row(p, answer) for p, answer in zip(tiny_drafter.PROMPTS, answers, strict=True)]
    command[5] = tiny_jsonl(rows, name="answers.jsonl")
    assert evaluate.main([*map(str, command[:-2]), "--trust_text"]) == 0
    assert json.loads(out.read_text()) == result

    place = len(tiny_drafter.PROMPTS[1]) + 7
    rows[1]["input_ids"][place] = (rows[1]["input_ids"][place] + 1) % 250
    command[5] = tiny_jsonl(rows, name="changed.jsonl")
    assert evaluate.main([*map(str, command[:-2]), "--trust_text"]) == 0
    # Not the argmax itself, and the target would go on differently after it.
    assert json.loads(out.read_text())["not_argmax_share"] >= 1 / (prompts * LIMIT)
    assert "are not the target's argmax" in capsys.readouterr().out


def test_conversations(
    export: Path, bench: tiny_drafter.Bench, tiny_jsonl: Callable[..., Path]
) -> None:
    """Chat rows: the prompt is all that precedes the last answer."""
    result = evaluate.evaluate(export, str(bench.folder), tiny_jsonl(n=2), max_new_tokens=8)
    assert [sum(lengths) for lengths in result["per_prompt"]] == [7, 7]
    result = evaluate.evaluate(export, str(bench.folder), tiny_jsonl(n=2), trust_text=True)
    assert result["not_argmax_share"] > 0.5  # the target is random, the answers are English


def test_answers_end_as_in_a_run(
    tiny_target_dir: Path,
    tiny_jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end tokens of the model's files and at the tokenizer's, which they lack."""
    target = shutil.copytree(tiny_target_dir, tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        files = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(files | {"eos_token_id": 256}))
    ends = 256, load_tokenizer(str(target)).eos_token_id
    answers = [[65, 66] * 3 + [end] + [65, 66] * 3 for end in ends]
    tiny_jsonl([row([70, 71], answer) for answer in answers], name="heldout.jsonl")
    data = [tmp_path / "heldout.jsonl"]
    lengths = []
    monkeypatch.setattr(loop, "accept_len", lambda found: lengths.append(found) or 0.0)
    run = TinyRun(target, lambda n, name="train.jsonl": data[0], tmp_path)
    assert run("a", "--train.steps=1") == 0

    result = evaluate.evaluate(tmp_path / "a" / "export", str(target), data[0], trust_text=True)
    assert result["per_prompt"] == lengths[-1]
    assert [sum(steps) for steps in result["per_prompt"]] == [6, 6]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["accept_len_prompt_lookup"] == result["prompt_lookup"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
        ({"--drafter": "nowhere"}, "nowhere"),
        ({"--target": "./nowhere"}, "model.target: found './nowhere'"),
        ({"--max_new_tokens": "0"}, "--max_new_tokens: found '0', want an integer from 1 on"),
        ({"--device": "cuda:99"}, "--device: found 'cuda:99'"),
        ({"--device": "gpu"}, "--device: found 'gpu'"),
        (
            {"--max_new_tokens": "513"},
            "--max_new_tokens: found 513, want at most 512, the target's",
        ),
        ({"--json": "/dev/stdout"}, "--json: found /dev/stdout, a device or a pipe, want a file"),
        ({"--json": "no/such/folder/out.json"}, "--json: no/such/folder/out.json"),
    ],
)
def test_bad_input_is_one_line(
    change: dict[str, str],
    message: str,
    export: Path,
    bench: tiny_drafter.Bench,
    tiny_jsonl: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"--drafter": export, "--target": bench.folder, "--data": tiny_jsonl(n=1)}
    options |= {"--max_new_tokens": "2"} | change
    assert evaluate.main([str(x) for item in options.items() for x in item]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]


def test_a_drafter_of_another_target(
    bench: tiny_drafter.Bench,
    export: Path,
    tmp_path: Path,
    tiny_jsonl: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = shutil.copytree(export, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["num_target_layers"] = config["dflash_config"]["num_target_layers"] = 9
    (other / "config.json").write_text(json.dumps(config))
    data = tiny_jsonl(n=1)
    options = ["--drafter", other, "--target", bench.folder, "--data", data]
    assert evaluate.main(list(map(str, options))) == 2
    assert "num_target_layers: found 9, want the target's 6" in capsys.readouterr().err
