"""Draft trees against enumeration, and tree acceptance against decoding step by step."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import tiny_drafter
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dflash_ext.ddtree import path_pops
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import Answer, Text, measure_text

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


def best_nodes(log_probs: Tensor, budget: int) -> set[tuple[int, ...]]:
    """The `budget` most likely token paths, depth by depth: a best node's parent is a best node."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    nodes: list[tuple[float, tuple[int, ...]]] = []
    for slot in log_probs:
        children = [
            (value + float(slot[token]), (*node, token))
            for value, node in beam
            for token in slot.topk(min(budget, len(slot))).indices.tolist()
        ]
        beam = sorted(children, reverse=True)[:budget]
        nodes += beam
    return {node for _, node in sorted(nodes, reverse=True)[:budget]}


@torch.inference_mode()
def decode_with_trees(bench: tiny_drafter.Bench, prompt: Sequence[int], budget: int) -> list[int]:
    """Accepted + 1 per step of a plain decoder: no cache, every tree path verified by itself."""
    target, model, head = bench.target, bench.drafter, bench.head
    spec = model.spec

    def choice(ids: Sequence[int]) -> int:
        return int(target.model(input_ids=torch.tensor([list(ids)])).logits[0, -1].argmax())

    ids = [*prompt, choice(prompt)]
    max_length = len(prompt) + MAX_NEW_TOKENS
    lengths = []
    while len(ids) < max_length:
        anchor = len(ids) - 1
        size = min(spec.block_size, max_length - anchor)
        hidden = tiny_drafter.capture(target, spec.target_layer_ids, torch.tensor(ids[:anchor]))
        block = BlockLayout(size).input_ids(torch.tensor(ids[-1:]), spec.mask_token_id)
        ctx_kv = model.context(hidden, torch.arange(anchor))
        start, end = torch.tensor([0]), torch.tensor([anchor])
        states = model(head.embed(block), ctx_kv, start, end)[0, 1:]
        tree = best_nodes((states @ head.head_weight.T).log_softmax(-1), budget)
        node: tuple[int, ...] = ()
        while (bonus := choice([*ids, *node])) is not None and (*node, bonus) in tree:
            node = (*node, bonus)
        new = [*node, bonus][: max_length - len(ids)]
        lengths.append(len(new))
        ids += new
    return lengths


def test_lengths_equal_a_tree_decoder(tiny_target_dir: Path) -> None:
    bench = tiny_drafter.bench(tiny_target_dir)
    totals = dict.fromkeys(BUDGETS, 0)
    for prompt, whole in zip(tiny_drafter.PROMPTS, bench.texts, strict=True):
        ids = whole[: len(prompt) + MAX_NEW_TOKENS]
        text = Text(ids, [Answer(len(prompt), len(ids) - 1, len(ids))])
        found = measure_text(bench.target, bench.drafter, bench.head, text, budgets=BUDGETS).ddtree
        for budget in BUDGETS:
            assert found[budget] == decode_with_trees(bench, prompt, budget), budget
            totals[budget] += len(found[budget])
    # More nodes, fewer steps: the budgets were told apart.
    assert totals[1] > totals[4] > totals[32]
