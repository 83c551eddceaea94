"""Our figures against z-lab's own decoder, on an export that its loader reads."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import tiny_drafter
import torch

from dflash_ext import evaluate
from dflash_ext.acceptance import propose
from dflash_ext.layout import BlockLayout
from dflash_ext.measure import Answer, Measurement, NearTie, Text, measure_text
from dflash_ext.target import load_target
from dflash_ext.zlab import zlab_model_module

PROMPTS = range(len(tiny_drafter.PROMPTS))


@pytest.fixture(scope="module")
def bench(tiny_target_dir: Path) -> tiny_drafter.Bench:
    return tiny_drafter.bench(tiny_target_dir)


@pytest.fixture(scope="module")
def export(bench: tiny_drafter.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    bench.drafter.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def zlab_model() -> ModuleType:
    return zlab_model_module()


@pytest.fixture(scope="module")
def zlab_drafter(zlab_model: ModuleType, export: Path) -> torch.nn.Module:
    return zlab_model.DFlashDraftModel.from_pretrained(export, dtype=torch.float32).eval()


class Case:
    """One prompt of the bench, measured by us and decoded by z-lab."""

    def __init__(
        self,
        bench: tiny_drafter.Bench,
        zlab_model: ModuleType,
        zlab_drafter: torch.nn.Module,
        index: int,
    ) -> None:
        self.bench, self.zlab_model, self.zlab_drafter = bench, zlab_model, zlab_drafter
        self.prompt, self.ids = tiny_drafter.PROMPTS[index], bench.texts[index]
        self.first = len(self.prompt)

    def measure(self, text: Text) -> Measurement:
        return measure_text(
            self.bench.target, self.bench.drafter, self.bench.head, text, budgets=()
        )

    def text(self, max_new_tokens: int, stop: int | None = None) -> Text:
        """What the target answers under this length limit and with this stop token."""
        ids = list(self.ids[: self.first + max_new_tokens])
        if stop in ids[self.first :]:
            ids = ids[: ids.index(stop, self.first) + 1]
        return Text(ids, [Answer(self.first, len(ids) - 1, self.first + max_new_tokens)])

    def compare(self, max_new_tokens: int, stop: int | None = None) -> list[int]:
        """Our lengths, after a check that z-lab's decoder reports the same."""
        ours = self.measure(self.text(max_new_tokens, stop))
        theirs = self.zlab_model.dflash_generate(
            self.zlab_drafter,
            target=self.bench.target.model,
            input_ids=torch.tensor([self.prompt]),
            max_new_tokens=max_new_tokens,
            stop_token_ids=None if stop is None else [stop],
            temperature=0.0,
            return_stats=True,
        ).acceptance_lengths
        block_size = self.bench.drafter.spec.block_size
        check_equal(ours.lengths, theirs, self.first, block_size, ours.near_ties)
        return ours.lengths


def check_equal(
    ours: list[int], theirs: list[int], first: int, block_size: int, ties: Sequence[NearTie]
) -> None:
    """Equal, or equal up to a step for which a top-2 logit gap below 1e-4 is shown."""
    anchor = first
    for mine, other in itertools.zip_longest(ours, theirs):
        if mine != other:
            shown = [tie for tie in ties if anchor < tie.position < anchor + block_size]
            assert shown, f"anchor {anchor}: ours {ours}, z-lab's {theirs}, no near-tie"
            return
        anchor += mine


@pytest.fixture(params=PROMPTS)
def case(
    request: pytest.FixtureRequest,
    bench: tiny_drafter.Bench,
    zlab_model: ModuleType,
    zlab_drafter: torch.nn.Module,
) -> Case:
    return Case(bench, zlab_model, zlab_drafter, request.param)


def test_block_states_equal_zlabs(bench: tiny_drafter.Bench, zlab_drafter: torch.nn.Module) -> None:
    target, drafter, spec = bench.target, bench.drafter, bench.drafter.spec
    ids = torch.tensor(bench.texts[0])
    hidden = tiny_drafter.capture(target, spec.target_layer_ids, ids)
    with torch.no_grad():
        ctx_kv = drafter.context(hidden, torch.arange(len(ids)))
    for anchor, size in itertools.product((1, 9, 40), (2, 5, spec.block_size)):
        block_ids = BlockLayout(size).input_ids(ids[anchor : anchor + 1], spec.mask_token_id)
        start, end = torch.tensor([0]), torch.tensor([anchor])
        with torch.no_grad():
            ours = drafter(bench.head.embed(block_ids), ctx_kv, start, end)
            theirs = zlab_drafter(
                position_ids=torch.arange(anchor + size)[None],
                noise_embedding=target.model.get_input_embeddings()(block_ids),
                target_hidden=hidden[None, :anchor],
            )
            logits = zlab_drafter.compute_logits(theirs, target.model.lm_head)[:, 1:]
        assert (ours - theirs).norm() / theirs.norm() < 1e-5, (anchor, size)
        best = propose(drafter, bench.head, ctx_kv, ids[end], start, end, size=size, k=3)
        torch.testing.assert_close(best.values, logits.topk(3).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(best.logsumexp, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(best.indices, logits.topk(3).indices)


def test_whole_answers(
    bench: tiny_drafter.Bench, zlab_model: ModuleType, zlab_drafter: torch.nn.Module
) -> None:
    cases = [Case(bench, zlab_model, zlab_drafter, index) for index in PROMPTS]
    lengths = [n for case in cases for n in case.compare(tiny_drafter.MAX_NEW_TOKENS)]
    # A drafter whose proposals are all wrong, or all right, would prove nothing.
    assert {1, 2, 3, bench.drafter.spec.block_size} <= set(lengths)


@pytest.mark.parametrize("limit", [1, 2, 3, 31, 32, 33, 34])
def test_length_limits(case: Case, limit: int) -> None:
    assert sum(case.compare(limit)) == limit - 1


def test_the_block_before_a_limit_is_shorter(
    bench: tiny_drafter.Bench, zlab_model: ModuleType, zlab_drafter: torch.nn.Module
) -> None:
    """Limits chosen so that a full block there would give other lengths."""
    chosen = []
    for index, limit in itertools.product(PROMPTS, range(4, tiny_drafter.MAX_NEW_TOKENS)):
        case = Case(bench, zlab_model, zlab_drafter, index)
        ids, last = case.ids[: case.first + limit], case.first + limit - 1
        full = case.measure(Text(ids, [Answer(case.first, last, limit=10**6)]))
        if full.lengths != case.measure(case.text(limit)).lengths:
            chosen.append((case, limit))
    assert chosen
    for case, limit in chosen[:6]:
        case.compare(limit)


def test_stop_tokens(case: Case) -> None:
    whole, answer = case.compare(tiny_drafter.MAX_NEW_TOKENS), case.ids[case.first :]
    assert case.compare(tiny_drafter.MAX_NEW_TOKENS, stop=answer[0]) == []
    # Tokens that first occur inside an accepted run: as stop tokens they cut that step short.
    stops, place = {}, 0
    for length in whole:
        for i in range(place + 1, place + length):
            if answer[i] not in answer[:i]:
                stops[answer[i]] = i - place
        place += length
    assert stops
    for stop, cut in list(stops.items())[:4]:
        assert case.compare(tiny_drafter.MAX_NEW_TOKENS, stop=stop)[-1] == cut


def test_the_command(
    bench: tiny_drafter.Bench,
    export: Path,
    zlab_model: ModuleType,
    zlab_drafter: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`evaluate` on a file of prompts, with a target whose answers partly end by themselves."""
    limit = 40
    answers = [t[len(p) :] for p, t in zip(tiny_drafter.PROMPTS, bench.texts, strict=True)]
    elsewhere = set(answers[1][:limit]) | set(answers[2][:limit])
    stop = next(t for t in answers[0][20:limit] if t not in elsewhere | set(answers[0][:20]))
    target_dir = shutil.copytree(bench.folder, tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((target_dir / name).read_text())
        (target_dir / name).write_text(json.dumps(config | {"eos_token_id": stop}))
    rows = [
        {"input_ids": [*prompt, 0, 0], "loss_mask": [0] * len(prompt) + [1, 1]}
        for prompt in tiny_drafter.PROMPTS
    ]
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    command = ["--drafter", export, "--target", target_dir, "--data", data, "--json", out]
    assert evaluate.main([*map(str, command), "--max_new_tokens", str(limit)]) == 0

    result = json.loads(out.read_text())
    assert load_target(str(target_dir), dtype="float32", device="cpu").info.eos_token_ids == (stop,)
    for index, ours in enumerate(result["per_prompt"]):
        case = Case(bench, zlab_model, zlab_drafter, index)
        assert ours == case.compare(limit, stop)
        assert (sum(ours) < limit - 1) == (index == 0)
    means = [sum(lengths) / len(lengths) for lengths in result["per_prompt"]]
    assert result["accept_len"] == pytest.approx(sum(means) / len(means))
