"""The quality run: its questions, its comparison of decoders, what its commands are given."""

import json
import sys
import types
from pathlib import Path

import pytest
import tiny_drafter
import torch
from torch import Tensor, nn

from benchmarks import quality, quality_specforge
from benchmarks.quality_prompts import names_by_module, package_of, questions, split_of
from benchmarks.quality_zlab import Compared, Decoders, left_over, same, summarise
from dflash_ext.config import UserError, parse_config
from dflash_ext.drafter import DFlashDraftModel
from dflash_ext.logger import read_metrics


def test_no_package_and_no_question_is_in_both_splits() -> None:
    train, heldout = questions("train"), questions("heldout")
    topics = [{row["topic"] for row in rows} for rows in (train, heldout)]
    assert not topics[0] & topics[1]
    assert topics[0] | topics[1] == {package_of(module) for module in names_by_module()}
    texts = [row["messages"][0]["content"] for row in train + heldout]
    assert len(set(texts)) == len(texts)
    assert len(heldout) >= 400 and len(train) >= 10_000
    assert len(topics[1]) >= 12


def test_questions_name_their_topic_and_are_the_same_every_time() -> None:
    rows = questions("heldout")
    assert rows == questions("heldout")
    modules = [module for module in names_by_module() if split_of(module) == "heldout"]
    assert all(any(m in row["messages"][0]["content"] for m in modules) for row in rows)
    # A prefix, as a smaller run takes it, mixes the packages.
    assert len({row["topic"] for row in rows[:60]}) >= 8


def test_the_shipped_names_are_small() -> None:
    assert quality.RECIPE.exists()
    size = (quality.RECIPE.parent / "data" / "python_library.txt").stat().st_size
    assert size < 2**18


def compared(ours: list[int], zlab: list[int], ties: list[int] = []) -> Compared:  # noqa: B006
    near = [{"model": "target", "position": position, "gap": 0.0} for position in ties]
    return Compared(0, prompt=10, ours=ours, zlab=zlab, near_ties=near)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (compared([2, 3], [2, 3]), "equal"),
        (compared([2, 3], [2, 1, 2]), "differ"),
        (compared([2, 3], [2, 1, 2], ties=[13]), "near-tie"),
        (compared([2, 3], [2, 1, 2], ties=[11, 20]), "differ"),
        (compared([2], [2, 1]), "differ"),
    ],
)
def test_verdict_on_a_prompt(row: Compared, verdict: str) -> None:
    assert same(row, block_size=4) == verdict


def test_summary_counts_verdicts_and_means() -> None:
    found = summarise([compared([2, 4], [2, 4]), compared([1], [3])], block_size=4)
    assert found == {
        "prompts": 2,
        "ours": 2.0,
        "zlab": 3.0,
        "equal": 1,
        "near-tie": 0,
        "differ": 1,
    }


def test_both_decoders_agree_and_a_shard_goes_on(tiny_target_dir: Path, tmp_path: Path) -> None:
    bench = tiny_drafter.bench(tiny_target_dir)
    bench.drafter.save_pretrained(tmp_path / "export")
    rows = [
        {"input_ids": text, "loss_mask": [0] * 5 + [1] * (len(text) - 5)} for text in bench.texts
    ]
    data = tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decoders = Decoders(tmp_path / "export", str(tiny_target_dir), data, "float32", "cpu")
    found = [decoders.compare(index, 20) for index in range(len(rows))]
    assert [same(row, bench.drafter.spec.block_size) for row in found] == ["equal"] * len(rows)
    assert max(max(row.ours) for row in found) > 1

    out = tmp_path / "decoded.jsonl"
    assert list(left_over(out, range(3))) == [0, 1, 2]
    out.write_text(json.dumps(vars(found[1])) + "\n")
    assert list(left_over(out, range(3))) == [0, 2]


def settings(tmp_path: Path, **changes: object) -> quality.Settings:
    return quality.Settings(**{"folder": tmp_path, "device": "cpu", "dtype": "float32", **changes})


def test_trainings_differ_in_their_name_alone(tmp_path: Path) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    toy = settings(tmp_path, steps=80, flags=("--train.lr", "0.5"))
    one, two = (parse_config(quality.training_flags(toy, name))[0] for name in ("a", "b"))
    assert (one.train.steps, one.train.eval_every, one.train.lr) == (80, 10, 0.5)
    assert one.drafter.block_size == 8
    assert one.train.dpace_alpha is None
    assert (one.log.name, two.log.name) == ("a", "b")
    two.log.name = "a"
    assert one == two


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bad\.log: found exit 1 .*nothing_there"):
        quality.together(settings(tmp_path), bad=["nothing_there"])


def test_report_in_words() -> None:
    drafter = {
        "accept_len": 2.5,
        "accept_len_pooled": 2.25,
        "ddtree": {"16": 3.0, "64": 3.5, "256": 4.0},
        "prompt_lookup": 1.25,
        "curve": [[0, 1.0], [8, 2.5]],
    }
    counts = {"kept": 1000, "rows": 1200, "loops": 200, "tokens": 5000, "supervised_tokens": 4000}
    found = {
        "conditions": {"machine": "any"},
        "settings": {"dtype": "bfloat16"},
        "text": {"train": counts, "heldout": counts},
        "decoders": {
            "prompts": 3,
            "ours": 2.5,
            "zlab": 2.4,
            "equal": 1,
            "near-tie": 1,
            "differ": 1,
        },
        "drafters": {"ours": drafter, "specforge": {**drafter, "curve": [[0, 1.0], [4, 1.5]]}},
    }
    text = quality.markdown(found)
    assert "| ours | 2.500 | 2.250 | 3.000, 3.500, 4.000 | 1.250 |" in text
    assert "| 4 | - | 1.500 |" in text
    assert "Our walk 2.500, z-lab's decoder 2.400 over 3 prompts in bfloat16" in text


def fake_specforge(ours: DFlashDraftModel, seen: list[tuple[Tensor, ...]]) -> dict[str, object]:
    """The two modules of specforge that are imported, over a drafter of ours."""

    class Online(nn.Module):
        def __init__(self, drafter: nn.Module, *args: object, **kwargs: object) -> None:
            super().__init__()
            self.drafter, self.num_anchors = drafter, 0

        def forward(self, ids: Tensor, hidden: Tensor, mask: Tensor) -> tuple[Tensor]:
            seen.append((ids, hidden.clone(), mask, torch.tensor(self.num_anchors)))
            return (sum(p.square().sum() for p in self.drafter.parameters()),)

    family = types.ModuleType("specforge.algorithms.common.dflash_family_model")
    draft = types.ModuleType("specforge.modeling.draft.dflash")
    family.OnlineDFlashModel = Online
    draft.DFlashDraftModel = lambda config: DFlashDraftModel(ours.spec)
    parts = ["specforge", "specforge.algorithms", "specforge.algorithms.common"]
    parts += ["specforge.modeling", "specforge.modeling.draft"]
    packages = {name: types.ModuleType(name) for name in parts}
    return {**packages, family.__name__: family, draft.__name__: draft}


def test_specforge_gets_our_batches(
    tiny_target_dir: Path, tiny_jsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, heldout = tiny_jsonl(n=9), tiny_jsonl(n=3, name="heldout.jsonl")
    (tmp_path / "config.yaml").write_text(
        f"""
model: {{target: {tiny_target_dir}, dtype: float32}}
drafter: {{num_layers: 2, block_size: 4, init_from: target}}
data: {{train: [{data}], eval: [{heldout}], token_budget: 200}}
topology: {{targets: [cpu], drafters: [cpu], cpu_threads: 1}}
train: {{steps: 2, lr: 0.003, max_anchors: 12}}
log: {{dir: {tmp_path}, name: peer, every: 1}}
"""
    )
    cfg, _ = parse_config(["--config", str(tmp_path / "config.yaml")])
    seen: list[tuple[Tensor, ...]] = []
    built = quality_specforge.Pipeline

    def build(*args: object) -> object:
        pipeline = built(*args)
        for name, module in fake_specforge(pipeline.model, seen).items():
            monkeypatch.setitem(sys.modules, name, module)
        return pipeline

    monkeypatch.setattr(quality_specforge, "Pipeline", build)
    run = quality_specforge.PeerRun(cfg, tmp_path / "peer")
    run.run()

    plan = run.pipeline.planner.step_plans(0)[0]
    ids, hidden, mask, anchors = seen[0]
    assert torch.equal(ids, plan.input_ids)
    assert int(anchors) == round(12 / len(ids))
    for row, (document, length) in enumerate(zip(plan.doc_ids, plan.lengths.tolist(), strict=True)):
        example = run.pipeline.examples[document]
        assert mask[row].sum() == example.loss_mask.sum()
        assert mask[row, : len(example)].tolist() == example.loss_mask.tolist()
        states = run.pipeline.target.model(ids[row : row + 1, :length], output_hidden_states=True)
        want = [states.hidden_states[i + 1][0] for i in run.pipeline.layer_ids]
        torch.testing.assert_close(hidden[row, :length], torch.cat(want, dim=-1))
        assert not hidden[row, length:].any()
    rows = read_metrics(tmp_path / "peer" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["loss"] > rows[2]["loss"]  # the sum of squares goes down
    assert {"eval_accept_len", "loss"} <= set(rows[2])
    trained = DFlashDraftModel.from_pretrained(tmp_path / "peer" / "export")
    assert trained.spec == run.ours.spec


def test_a_training_that_was_cut_short_is_not_done(tmp_path: Path) -> None:
    toy = settings(tmp_path, steps=8)
    (toy.run_dir("ours") / "export").mkdir(parents=True)
    rows = toy.run_dir("ours") / "metrics.jsonl"
    assert not quality.trained(toy, "ours")
    rows.write_text('{"step": 4, "eval_accept_len": 1.5}\n{"step": 8, "loss": 2.0}\n')
    assert not quality.trained(toy, "ours")
    rows.write_text('{"step": 8, "loss": 2.0, "eval_accept_len": 1.5}\n')
    assert quality.trained(toy, "ours")
    (toy.run_dir("ours") / "export").rmdir()
    assert not quality.trained(toy, "ours")
