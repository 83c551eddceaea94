"""Whether training text looks like the target's own, and who is told."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from dflash_ext.config import DataConfig, UserError
from dflash_ext.data.conversations import load_examples
from dflash_ext.data.text_settings import template_hash
from dflash_ext.greedy_text import greedy_tokens
from dflash_ext.target import Target, load_target, load_tokenizer
from dflash_ext.text_check import check_text, text_fit


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture
def tokenizer(tiny_target_dir: Path):
    return load_tokenizer(str(tiny_target_dir))


@pytest.fixture
def corpus(tokenizer, tmp_path):
    """corpus(rows of ids and mask) -> the corpus, and its file."""

    def make(rows):
        path = tmp_path / "text.jsonl"
        lines = [json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in rows]
        path.write_text("\n".join(lines) + "\n")
        cfg = DataConfig(train=[str(path)], drop_loops=False)
        return load_examples([str(path)], tokenizer, cfg)[0], cfg

    return make


def greedy_rows(target: Target, count: int) -> list[tuple[list[int], list[int]]]:
    rows = []
    for seed in range(count):
        prompt = np.random.default_rng(seed).integers(0, 250, 5 + seed).tolist()
        rows.append((prompt + list(greedy_tokens(target.model, prompt, 20, [])), [0] * len(prompt)))
    return [(ids, mask + [1] * (len(ids) - len(mask))) for ids, mask in rows]


def random_rows(count: int, length: int = 40) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(1)
    mask = [0] * 5 + [1] * (length - 5)
    return [(rng.integers(0, 250, length).tolist(), mask) for _ in range(count)]


def test_the_figures_are_those_of_plain_torch(target: Target, corpus) -> None:
    rows = random_rows(3)
    rows[1] = (rows[1][0], [1] * 9 + [0] * 11 + [1] * 20)  # from the first token on, and a gap
    examples, _ = corpus(rows)
    fit = text_fit(target, examples)
    log_probs, first = [], []
    for ids, mask in rows:
        logits = target.model(torch.tensor([ids]), use_cache=False).logits[0].double()
        for i in range(1, len(ids)):
            if mask[i]:
                log_probs.append(torch.log_softmax(logits[i - 1], -1)[ids[i]].item())
                first.append(logits[i - 1].argmax().item() == ids[i])
    assert fit is not None and fit.tokens == len(log_probs)
    assert fit.log_prob == pytest.approx(np.mean(log_probs), abs=1e-5)
    assert fit.greedy_share == pytest.approx(np.mean(first))


def test_its_own_greedy_text_is_all_first_choices(target: Target, tokenizer, corpus) -> None:
    examples, cfg = corpus(greedy_rows(target, 4))
    check = check_text(target, tokenizer, examples, cfg)
    assert check.fit is not None and check.fit.greedy_share == 1.0
    assert "100% are its first choice (80 looked at)" in check.lines()[0]
    assert check.fit.log_prob > text_fit(target, corpus(random_rows(4))[0]).log_prob


def test_other_text_is_warned_of(target: Target, tokenizer, corpus) -> None:
    examples, cfg = corpus(random_rows(4))
    check = check_text(target, tokenizer, examples, cfg)
    assert check.fit is not None and check.fit.log_prob < -3
    assert check.lines()[1].startswith("warning  the text does not look like the target's own")
    assert check.facts()["log_prob"] == round(check.fit.log_prob, 4)


def test_what_is_looked_at_is_bounded_and_spread(target: Target, corpus, monkeypatch) -> None:
    rows = [*random_rows(400, length=120), ([1, 2, 3] * 130, [0] * 380 + [1] * 10)]
    examples, _ = corpus(rows)
    seen: list[int] = []
    forward = target.forward_capture

    def counting(ids, *args, **kwargs):
        seen.append(ids.numel())
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward_capture", counting)
    before = torch.get_rng_state()
    assert text_fit(target, examples) == text_fit(target, examples)
    assert sum(seen) / 2 <= 768 and len(seen) / 2 >= 5
    assert torch.equal(before, torch.get_rng_state())


def test_text_that_was_made_otherwise_is_named(target: Target, tokenizer, corpus) -> None:
    examples, cfg = corpus(greedy_rows(target, 4))
    beside = Path(f"{cfg.train[0]}.settings.yaml")
    template = template_hash(tokenizer)

    def warnings(settings: dict) -> list[str]:
        beside.write_text(yaml.safe_dump(settings))
        lines = check_text(target, tokenizer, examples, cfg).lines()
        return [line for line in lines if "was made with" in line]

    assert warnings({"template": template, "enable_thinking": None, "temperature": 0}) == []
    assert warnings({"model": "x", "enable_thinking": None}) == []
    assert warnings({"template": "0123", "enable_thinking": None}) == [
        f"warning  {cfg.train[0]} was made with the chat template '0123', the tokenizer has "
        f"{template}".replace("'0123'", "0123")
    ]
    assert warnings({"template": template, "enable_thinking": False}) == [
        f"warning  {cfg.train[0]} was made with enable_thinking False, this run has "
        "data.enable_thinking None"
    ]
    settings = check_text(target, tokenizer, examples, cfg).facts()["regenerate"]
    assert settings == {cfg.train[0]: {"template": template, "enable_thinking": False}}
    folder = dataclasses.replace(cfg, train=[f"2 * {Path(cfg.train[0]).parent}"])
    assert check_text(target, tokenizer, examples, folder).facts()["regenerate"] == settings
    beside.write_text("[1, 2]")
    with pytest.raises(UserError, match=r"settings.yaml: found \[1, 2\], want what regenerate"):
        check_text(target, tokenizer, examples, cfg)


def test_greedy_text_that_is_not_greedy_is_warned_of(
    target: Target, tokenizer, corpus, monkeypatch
) -> None:
    monkeypatch.setattr("dflash_ext.text_check.LOW_LOG_PROB", -100.0)  # of a random model
    rows = greedy_rows(target, 4)

    def told() -> bool:
        examples, cfg = corpus(rows)
        Path(f"{cfg.train[0]}.settings.yaml").write_text("temperature: 0\n")
        lines = check_text(target, tokenizer, examples, cfg).lines()
        return any("was made greedily, yet often is not" in line for line in lines)

    assert not told()
    for ids, _ in rows:
        ids[-3] = (ids[-3] + 1) % 250
    assert told()
