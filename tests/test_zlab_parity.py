"""Our figures against z-lab's own decoder, on exports that its loader reads."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import tiny_drafter
import torch
import zlab

from dflash_ext.acceptance import propose
from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import Answer, NearTie, Text, measure_text
from dflash_ext.target import Target, load_target

MAX_NEW_TOKENS = 60


@pytest.fixture(scope="module")
def zlab_model() -> ModuleType:
    return zlab.zlab_model_module()


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    return tiny_drafter.greedy_texts(target, MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def drafter(target: Target, texts: list[list[int]]) -> DFlashDraftModel:
    return tiny_drafter.train_on(target, tiny_drafter.tiny_spec(target), texts[:3], steps=90)


@pytest.fixture(scope="module")
def export(drafter: DFlashDraftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    drafter.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def zlab_drafter(zlab_model: ModuleType, export: Path) -> torch.nn.Module:
    return zlab_model.DFlashDraftModel.from_pretrained(export, dtype=torch.float32).eval()


def zlab_lengths(
    zlab_model: ModuleType,
    zlab_drafter: torch.nn.Module,
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: list[int],
) -> list[int]:
    """What z-lab's decoder reports for one prompt."""
    return zlab_model.dflash_generate(
        zlab_drafter,
        target=target.model,
        input_ids=torch.tensor([list(prompt)]),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        temperature=0.0,
        return_stats=True,
    ).acceptance_lengths


def check_equal(
    ours: list[int], theirs: list[int], first: int, block_size: int, ties: Sequence[NearTie]
) -> None:
    """Equal, or equal up to a step for which a top-2 gap below 1e-4 is shown."""
    anchor = first
    for mine, other in itertools.zip_longest(ours, theirs):
        if mine != other:
            places = [tie for tie in ties if anchor < tie.position < anchor + block_size]
            assert places, f"anchor {anchor}: ours {ours}, z-lab's {theirs}, no near-tie"
            return
        anchor += mine


def answer_text(text: Sequence[int], first: int, max_new_tokens: int, stop: int | None) -> Text:
    """The text under a length limit and with a stop token, as the target would have given it."""
    ids = list(text[: first + max_new_tokens])
    if stop in ids[first:]:
        ids = ids[: ids.index(stop, first) + 1]
    return Text(ids, [Answer(first, len(ids) - 1, first + max_new_tokens)])


def test_block_states_equal_zlabs(
    target: Target,
    drafter: DFlashDraftModel,
    zlab_drafter: torch.nn.Module,
    texts: list[list[int]],
) -> None:
    spec, head = drafter.spec, tiny_drafter.tiny_head(target)
    ids = torch.tensor(texts[0])
    hidden = tiny_drafter.capture(target, spec.target_layer_ids, ids)
    ctx_kv = drafter.context(hidden, torch.arange(len(ids)))
    for anchor, size in itertools.product((1, 9, 40), (2, 5, spec.block_size)):
        block_ids = BlockLayout(size).input_ids(ids[anchor : anchor + 1], spec.mask_token_id)
        at = torch.tensor([anchor])
        with torch.no_grad():
            ours = drafter(head.embed(block_ids), ctx_kv, torch.zeros_like(at), at)
            theirs = zlab_drafter(
                position_ids=torch.arange(anchor + size)[None],
                noise_embedding=target.model.get_input_embeddings()(block_ids),
                target_hidden=hidden[None, :anchor],
            )
            logits = zlab_drafter.compute_logits(theirs, target.model.lm_head)
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 1e-5, (anchor, size)
        ours_best = propose(
            drafter, head, ctx_kv, ids[at], torch.zeros_like(at), at, size=size, k=3
        )
        best = logits[:, 1:].topk(3, dim=-1)
        torch.testing.assert_close(ours_best.values, best.values, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours_best.indices, best.indices)


def test_lengths_equal_zlabs_decoder(
    target: Target,
    drafter: DFlashDraftModel,
    zlab_model: ModuleType,
    zlab_drafter: torch.nn.Module,
    texts: list[list[int]],
) -> None:
    head, block_size = tiny_drafter.tiny_head(target), drafter.spec.block_size
    seen: list[int] = []
    for prompt, text in zip(tiny_drafter.PROMPTS, texts, strict=True):
        first = len(prompt)
        # Limits that fall at different places of a block, down to one step and none; then stops.
        limits = [(n, None) for n in (1, 2, 3, 17, 30, 31, 33, MAX_NEW_TOKENS)]
        stops = [(MAX_NEW_TOKENS, text[first + i]) for i in (0, 1, 20, 23, 41)]
        for max_new_tokens, stop in limits + stops:
            cut = answer_text(text, first, max_new_tokens, stop)
            ours = measure_text(target, drafter, head, cut, budgets=())
            theirs = zlab_lengths(
                zlab_model,
                zlab_drafter,
                target,
                prompt,
                max_new_tokens,
                [] if stop is None else [stop],
            )
            check_equal(ours.lengths, theirs, first, block_size, ours.near_ties)
            seen += ours.lengths
    # Nothing above could fail on a drafter whose proposals are all wrong, or all right.
    assert {1, 2, 3, block_size} <= set(seen)
    assert 1.5 < sum(seen) / len(seen) < block_size - 1
