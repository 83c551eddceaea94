"""Greedy decoding with draft trees, step by step as a server does it, and a check against it.

``PYTHONPATH=. python tests/tree_decoder.py --drafter DIR --target T --data FILE`` decodes real
prompts this way and compares every step with what `measure_text` infers from one prefill.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_ext.config import DataConfig
from dflash_ext.data.conversations import load_examples, prompt_and_answer
from dflash_ext.drafter import DFlashDraftModel, FrozenHead
from dflash_ext.greedy_text import new_cache
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import DDTREE_BUDGETS, Answer, Measurement, Text, measure_text
from dflash_ext.target import Target, load_target, load_tokenizer, stop_token_ids

Node = tuple[int, ...]  # the tokens from the anchor's child down to the node itself


def best_nodes(log_probs: Tensor, budget: int) -> list[Node]:
    """The `budget` most likely nodes, parents first; log_probs [slots, vocabulary].

    Depth by depth: a node's value is at most its parent's, so the parents of the best are among
    the best of their depth.
    """
    found: list[tuple[float, int, Node]] = []
    beam: list[tuple[float, Node]] = [(0.0, ())]
    for depth, slot in enumerate(log_probs.double(), start=1):
        top = slot.topk(min(budget, len(slot)))
        values = torch.tensor([value for value, _ in beam])[:, None].double() + top.values
        best = values.flatten().topk(min(budget, values.numel()))
        places = [divmod(i, len(top.values)) for i in best.indices.tolist()]
        tokens = top.indices.tolist()
        nodes = [(*beam[parent][1], tokens[child]) for parent, child in places]
        beam = list(zip(best.values.tolist(), nodes, strict=True))
        found += [(-value, depth, node) for value, node in beam]
    return [node for _, _, node in sorted(found)[:budget]]


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    lengths: list[int]  # tokens of each step: accepted + 1


class TreeDecoder:
    """One forward of the target a step verifies the whole tree and gives the hidden states."""

    def __init__(self, target: Target, model: DFlashDraftModel, head: FrozenHead) -> None:
        self.target, self.model, self.head = target, model, head

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], budget: int, max_new_tokens: int, stops: Collection[int] = ()
    ) -> Decoded:
        """Until a stop token or the length limit, which also shortens the last blocks."""
        cache = new_cache(self.target.model)
        causal = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
        logits, hidden = self._forward(prompt, torch.arange(len(prompt)), causal, cache)
        ids = [*prompt, int(logits[-1].argmax())]
        lengths = []
        while len(ids) < len(prompt) + max_new_tokens and ids[-1] not in stops:
            room = len(prompt) + max_new_tokens - len(ids)
            nodes = best_nodes(self._draft(ids, hidden, room), budget)
            path, states = self._verify(ids, nodes, cache)
            new = path[:room]
            if stop := [i for i, token in enumerate(new) if token in stops]:
                new = new[: stop[0] + 1]
            hidden = torch.cat([hidden, states])
            ids += new
            lengths.append(len(new))
        return Decoded(ids[len(prompt) :], lengths)

    def _draft(self, ids: Sequence[int], hidden: Tensor, room: int) -> Tensor:
        """Log-probabilities [slots, vocabulary] of the block after the last id, the anchor."""
        anchor, spec = len(ids) - 1, self.model.spec
        size = min(spec.block_size, room + 1)
        block = BlockLayout(size).input_ids(torch.tensor(ids[-1:]), spec.mask_token_id)
        ctx_kv = self.model.context(hidden, torch.arange(anchor))
        start, end = torch.tensor([0]), torch.tensor([anchor])
        states = self.model(self.head.embed(block), ctx_kv, start, end)[0, 1:]
        return (states @ self.head.head_weight.T).log_softmax(-1)

    def _verify(
        self, ids: Sequence[int], nodes: list[Node], cache: dict
    ) -> tuple[list[int], Tensor]:
        """The accepted tokens and the target's next one; hidden states of anchor and accepted.

        The cache keeps the rows of these and forgets the rest of the tree.
        """
        anchor = len(ids) - 1
        rows: dict[Node, int] = {(): 0} | {node: i for i, node in enumerate(nodes, start=1)}
        seen = torch.zeros(len(rows), anchor + len(rows), dtype=torch.bool)
        seen[:, :anchor] = True
        for node, row in rows.items():
            ancestors = [anchor + rows[node[:depth]] for depth in range(len(node) + 1)]
            seen[row, ancestors] = True
        tokens = [ids[-1], *(node[-1] for node in nodes)]
        positions = torch.tensor([anchor + len(node) for node in rows])
        logits, hidden = self._forward(tokens, positions, seen, cache)
        choices = logits.argmax(-1).tolist()
        node: Node = ()
        while (*node, choices[rows[node]]) in rows:
            node = (*node, choices[rows[node]])
        kept = [rows[node[:depth]] for depth in range(len(node) + 1)]
        (past,) = cache.values()
        keep = torch.tensor([*range(anchor), *(anchor + row for row in kept)])
        for layer in past.layers:
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        return [*node, choices[rows[node]]], hidden[kept]

    def _forward(
        self, tokens: Sequence[int], positions: Tensor, seen: Tensor, cache: dict
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, vocabulary] and captured hidden states [n, L*H]; seen [n, cached + n]."""
        out = self.target.model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=positions[None],
            attention_mask=seen[None, None],
            use_cache=True,
            output_hidden_states=True,
            **cache,
        )
        layers = [out.hidden_states[i + 1][0] for i in self.model.spec.target_layer_ids]
        return out.logits[0], torch.cat(layers, dim=-1)


@dataclass(frozen=True)
class Comparison:
    measured: Measurement
    decoded: dict[int, Decoded]

    @property
    def wrong_budgets(self) -> list[int]:
        """Budgets for which a step differs."""
        found = self.measured.ddtree
        return [b for b, decoded in self.decoded.items() if decoded.lengths != found[b]]


def compare(
    decoder: TreeDecoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    stops: Collection[int] = (),
    budgets: Sequence[int] = DDTREE_BUDGETS,
) -> Comparison:
    """Decode with trees of each budget, and measure the text that comes out."""
    decoded = {b: decoder.decode(prompt, b, max_new_tokens, stops) for b in budgets}
    tokens = decoded[budgets[0]].tokens
    assert all(d.tokens == tokens for d in decoded.values()), "greedy text depends on the tree"
    first = len(prompt)
    answer = Answer(first, first + len(tokens) - 1, first + max_new_tokens)
    text = Text([*prompt, *tokens], [answer])
    measured = measure_text(decoder.target, decoder.model, decoder.head, text, budgets=budgets)
    assert measured.not_argmax == 0, "the text is not the target's greedy one"
    return Comparison(measured, decoded)


def load_prompts(target_name: str, target: Target, data: Path) -> tuple[list[list[int]], set[int]]:
    """Prompts of a file of conversations, and the tokens that end an answer."""
    tokenizer = load_tokenizer(target_name, None)
    examples, _ = load_examples(
        [str(data)],
        tokenizer,
        DataConfig(drop_loops=False),
        mask_token_id=None,
        vocab_size=target.info.vocab_size,
    )
    prompts = [e.input_ids[: len(prompt_and_answer(e)[0])].tolist() for e in examples]
    return prompts, set(stop_token_ids(target.info, tokenizer))


def load_decoder(drafter: Path, target_name: str) -> TreeDecoder:
    """In float32 on the CPU."""
    target = load_target(target_name, dtype=torch.float32, device="cpu")
    model = DFlashDraftModel.from_pretrained(drafter).float().eval()
    return TreeDecoder(target, model, FrozenHead(target.embed_weight, target.head_weight))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=10**6)
    parser.add_argument("--max_new_tokens", type=int, default=160)
    args = parser.parse_args()
    decoder = load_decoder(args.drafter, args.target)
    prompts, stops = load_prompts(args.target, decoder.target, args.data)
    failed = 0
    for i, prompt in enumerate(prompts[: args.prompts]):
        begin = time.perf_counter()
        found = compare(decoder, prompt, args.max_new_tokens, stops)
        chain = statistics.fmean(found.measured.lengths)
        trees = {b: statistics.fmean(d.lengths) for b, d in found.decoded.items()}
        lower = [b for b, mean in trees.items() if mean < chain]
        failed += bool(found.wrong_budgets or lower)
        means = "  ".join(f"{b}: {mean:.3f}" for b, mean in trees.items())
        print(
            f"prompt {i}: {sum(found.measured.lengths) + 1} tokens, chain {chain:.3f}, "
            f"trees {means}; steps differ at {found.wrong_budgets}, below the chain at {lower}, "
            f"{len(found.measured.near_ties)} near ties, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    print(f"{failed} of {len(prompts[: args.prompts])} prompts differ")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
