"""Draft trees against enumeration, and tree acceptance against decoding step by step."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_drafter
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_decoder import TreeDecoder, compare, load_decoder, load_prompts

from dflash_ext.config import load_config
from dflash_ext.config_cli import DEFAULT_CONFIG
from dflash_ext.ddtree import path_pops

ROOT = Path(__file__).parent.parent

MAX_NEW_TOKENS = 36
BUDGETS = (1, 4, 32)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6), st.integers(1, 40))
def test_pops_are_the_places_in_the_order_of_value(
    depth: int, width: int, seed: int, budget: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(depth, width + 1, generator=generator, dtype=torch.float64)
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values[:, :width].tolist()
    nodes = [
        node for d in range(1, depth + 1) for node in itertools.product(range(width), repeat=d)
    ]

    def value(node: Sequence[int]) -> float:
        return sum(slot[rank] for slot, rank in zip(log_probs, node, strict=False))

    place = {node: i for i, node in enumerate(sorted(nodes, key=value, reverse=True))}
    path = tuple(torch.randint(width, (depth,), generator=generator).tolist())
    wanted = [place[path[:d]] for d in range(1, depth + 1)]
    inside = list(itertools.takewhile(lambda pop: pop < budget, wanted))
    assert path_pops(log_probs, path, budget) == inside


def test_a_path_that_leaves_the_candidates_ends_there() -> None:
    log_probs = [[-0.1, -3.0], [-0.2, -2.0], [-0.3, -1.0]]
    assert path_pops(log_probs, [0, 0], budget=50) == [0, 1]
    assert path_pops(log_probs, [], budget=50) == []
    assert path_pops(log_probs, [1, 1, 1], budget=1) == []


def test_lengths_equal_a_tree_decoder(tiny_target_dir: Path) -> None:
    bench = tiny_drafter.bench(tiny_target_dir)
    decoder = TreeDecoder(bench.target, bench.drafter, bench.head)
    totals = dict.fromkeys(BUDGETS, 0)
    for prompt, whole in zip(tiny_drafter.PROMPTS, bench.texts, strict=True):
        found = compare(decoder, prompt, MAX_NEW_TOKENS, budgets=BUDGETS)
        assert found.wrong_budgets == []
        for budget, decoded in found.decoded.items():
            assert decoded.tokens == whole[len(prompt) : len(prompt) + MAX_NEW_TOKENS]
            totals[budget] += len(decoded.lengths)
    # More nodes, fewer steps: the budgets were told apart.
    assert totals[1] > totals[4] > totals[32]


def test_a_tree_decoder_ends_at_a_stop_token(tiny_target_dir: Path) -> None:
    bench = tiny_drafter.bench(tiny_target_dir)
    decoder = TreeDecoder(bench.target, bench.drafter, bench.head)
    prompt = tiny_drafter.PROMPTS[0]
    answer = bench.texts[0][len(prompt) :]
    inside = {answer[place] for place in range(5, 25)} - set(answer[:5])
    for stop in sorted(inside):  # some of them in the middle of a step
        found = compare(decoder, prompt, MAX_NEW_TOKENS, {stop}, budgets=(16,))
        assert found.wrong_budgets == []
        assert found.decoded[16].tokens == answer[: answer.index(stop) + 1]


@pytest.mark.slow
def test_default_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter that `python -m dflash_ext.train` leaves, on held-out prompts.

    `python tests/tree_decoder.py` decodes as many as one has time for.
    """
    monkeypatch.chdir(ROOT)
    config = load_config(DEFAULT_CONFIG)
    export = Path(config.log.dir) / config.log.name / "export"
    if not export.exists():
        pytest.skip(f"no {export}: python -m dflash_ext.train has not run here")
    decoder = load_decoder(export, config.model.target)
    prompts, stops = load_prompts(config.model.target, decoder.target, Path(config.data.eval[0]))
    for prompt in prompts[::30]:
        found = compare(decoder, prompt, 24, stops)
        assert found.wrong_budgets == []
        for decoded in found.decoded.values():
            assert len(decoded.lengths) <= len(found.measured.lengths)
