"""draft_loss against its specification in fp64, and the specification against torch."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from draft_loss_cases import (
    EVERYTHING,
    OPTIONS,
    arguments,
    error,
    errors,
    gradient,
    make_case,
    plain_16bit,
)
from torch import Tensor

from dflash_ext.ops import draft_loss
from dflash_ext.ops.draft_loss import DIVERGENCES, draft_loss_stats
from dflash_ext.ops.draft_loss.naive import dpace_weights, draft_loss_stats_naive
from dflash_ext.ops.metric_add import WORD, new_accumulator


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_matches_naive_in_fp64(options: dict, dtype: torch.dtype, limit: float) -> None:
    case = make_case(7, 5, 33, 1000, dtype, options.get("valid_vocab"))
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, dtype, **options)
    assert found["rank"].equal(wanted["rank"])
    assert max(errors(found, wanted).values()) <= limit, errors(found, wanted)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1023, 1025, 4097])
@pytest.mark.parametrize("blocks, slots, width", [(1, 2, 1), (3, 4, 7), (9, 16, 64)])
@pytest.mark.parametrize("kl", DIVERGENCES)
def test_sizes(vocab: int, blocks: int, slots: int, width: int, kl: str) -> None:
    case = make_case(blocks, slots, width, vocab, torch.float32)
    options = {"kl_weight": 0.5, "cap_lambda": 0.5, "kl": kl}
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, torch.float32, **options)
    assert found["rank"].equal(wanted["rank"])
    for name in ("loss", "terms", "lse", "gradient"):
        scale = wanted[name].norm().clamp_min(1e-2)
        assert (found[name] - wanted[name]).norm() <= 1e-5 * scale, name


def test_bf16_is_as_good_as_plain_torch() -> None:
    case = make_case(6, 8, 96, 5000, torch.bfloat16)
    wanted = case.run(draft_loss_stats_naive, torch.float64)
    found = case.run(draft_loss_stats, torch.bfloat16)
    plain = error(plain_16bit(case), wanted["gradient"])
    assert error(found["gradient"], wanted["gradient"]) <= 2 * plain
    assert error(found["terms"], wanted["terms"]) <= 1e-5
    everything = EVERYTHING | {"valid_vocab": 5000}
    wanted = case.run(draft_loss_stats_naive, torch.float64, **everything)
    found = case.run(draft_loss_stats, torch.bfloat16, **everything)
    assert error(found["gradient"], wanted["gradient"]) <= 2 * plain


def test_naive_terms_are_torchs() -> None:
    case = make_case(4, 6, 16, 40, torch.float64)
    values = case.run(draft_loss_stats_naive, torch.float64, kl_weight=0.5, cap_lambda=2.0)
    logits = case.hidden @ case.weight.T
    teacher = (case.teacher_hidden @ case.weight.T)[case.teacher_index]
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    ce = F.cross_entropy(logits.flatten(0, 1), case.labels.flatten(), reduction="none")
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    cap = entropy * (logits.argmax(-1) == case.labels)
    picked = case.weights > 0
    wanted = torch.stack([ce.view_as(kl), kl, cap], -1)[picked]
    torch.testing.assert_close(values["terms"][..., 1:][picked], wanted)
    loss = wanted @ torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    weights = case.weights[picked].double()
    torch.testing.assert_close(values["loss"], (weights * loss).sum() / case.weights.sum().double())


def test_naive_dpace_is_the_formula() -> None:
    ce, mask = torch.rand(5, 6, dtype=torch.float64), torch.rand(5, 6) < 0.7
    for a, row in enumerate(dpace_weights(ce, mask, 0.3)):
        slots = mask[a].nonzero()[:, 0].tolist()
        confidence = {i: 0.7 * torch.exp(-ce[a, i]) + 0.3 for i in slots}
        for j in range(6):
            wanted = 0.0
            for m in [m for m in slots if m >= j and j in slots]:
                product = 1.0
                for i in [i for i in slots if i <= m]:
                    product = product * confidence[i]
                wanted = wanted + product
            torch.testing.assert_close(row[j], torch.as_tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [{}, *({"kl_weight": 0.7, "cap_lambda": 0.5, "softcap": 4.0, "kl": kl} for kl in DIVERGENCES)],
)
def test_gradcheck(options: dict) -> None:
    case = make_case(3, 3, 5, 11, torch.float64)
    if "kl_weight" in options:
        options = options | {
            "teacher_hidden": case.teacher_hidden,
            "teacher_index": case.teacher_index,
        }

    def loss(hidden: Tensor) -> Tensor:
        return draft_loss(
            hidden, case.weight, case.labels, case.weights, case.weights.sum(), case.rows,
            case.n_rows, **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, case.hidden.requires_grad_())


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"dpace_alpha": 0.5, "softcap": 3.0}])
@pytest.mark.parametrize("with_teacher", [False, True])
def test_opcheck(blocks: int, options: dict, with_teacher: bool) -> None:
    case = make_case(blocks, 4, 8, 37, torch.float32)
    args = [
        case.hidden.requires_grad_(),
        case.weight,
        case.labels,
        case.weights,
        case.weights.sum(),
        case.rows,
        case.n_rows,
    ]
    if with_teacher:
        args += [case.teacher_hidden, case.teacher_index]
        options = options | {"kl_weight": 1.0}
    torch.library.opcheck(torch.ops.dflash_ext.draft_loss.default, tuple(args), options)


def test_repeats_bit_for_bit_with_metrics_on_or_off(nan_poison: None) -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    wanted = gradient(case, cap_lambda=0.5)
    for measured in (False, True):
        acc = new_accumulator("cpu")
        found = gradient(case, cap_lambda=0.5, metrics=acc, measured=measured)
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
        slots = (case.weights > 0).sum().item()
        assert acc[WORD["slots"]] == (slots if measured else 0)
        mean = acc[WORD["loss_sum"]] / acc[WORD["loss_weight"]]
        torch.testing.assert_close(mean, wanted[0], rtol=1e-4, atol=0)
    with torch.no_grad():
        assert draft_loss(*arguments(case), cap_lambda=0.5).equal(wanted[0])


def test_metrics_count_ranks() -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    acc = new_accumulator("cpu")
    draft_loss(*arguments(case), metrics=acc)
    rank = draft_loss_stats(*arguments(case))[2][case.weights > 0]
    assert acc[WORD["top1"]] == (rank == 0).sum() > 0
    assert acc[WORD["top8"]] == (rank < 8).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_by_the_incoming_gradient(dtype: torch.dtype) -> None:
    case = make_case(3, 4, 8, 50, dtype)
    wanted = (gradient(case)[1].float() * -0.3).to(dtype)
    assert gradient(case, factor=-0.3)[1].equal(wanted)


def test_groups_add_up() -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    loss, whole = gradient(case)
    parts = torch.zeros_like(whole)
    total = torch.zeros(())
    rows = case.rows[: case.n_rows]
    for group in (rows[rows < 20], rows[rows >= 20]):
        part, part_gradient = gradient(
            dataclasses.replace(case, rows=group, n_rows=torch.tensor(group.numel()))
        )
        parts += part_gradient
        total += part
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(total, loss)


@pytest.mark.parametrize("chunk_rows", [1, 3, 16])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_threads_change_nothing_but_rounding(chunk_rows: int, threads: int) -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    wanted = gradient(case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = gradient(case, chunk_rows=chunk_rows)
    finally:
        torch.set_num_threads(before)
    assert error(found[0], wanted[0]) < 1e-6
    assert error(found[1], wanted[1]) < 1e-6


def test_strided_views() -> None:
    case = make_case(5, 6, 16, 300, torch.float32)
    wanted = gradient(case)
    wide = torch.randn(case.weight.shape[0], 40)
    wide[:, 3:19] = case.weight
    strided = dataclasses.replace(
        case,
        hidden=case.hidden.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        weight=wide[:, 3:19],
        labels=case.labels.T.contiguous().T,
        weights=case.weights.T.contiguous().T,
    )
    found = gradient(strided)
    assert error(found[0], wanted[0]) < 1e-6
    assert error(found[1], wanted[1]) < 1e-6
    transposed = dataclasses.replace(case, weight=case.weight.T.contiguous().T)
    assert error(gradient(transposed)[1], wanted[1]) < 1e-6


@pytest.mark.parametrize("how", ["no rows", "no weights", "no blocks"])
@pytest.mark.parametrize("options", [{}, {"dpace_alpha": 0.5, "cap_lambda": 1.0}], ids=str)
def test_nothing_to_learn_is_an_attached_zero(how: str, options: dict) -> None:
    case = make_case(0 if how == "no blocks" else 3, 4, 8, 50, torch.float32)
    if how == "no rows":
        case.weights.zero_()
        case.n_rows.zero_()
    if how == "no weights":
        case.weights.zero_()
    hidden = case.hidden.clone().requires_grad_()
    loss = draft_loss(*arguments(case, hidden), metrics=new_accumulator("cpu"), **options)
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert hidden.grad.count_nonzero() == 0


def test_ties_rank_by_lowest_index() -> None:
    weight = torch.zeros(40, 4)
    weight[[5, 9, 20], 0] = 1.0
    weight[30, 0] = 2.0
    hidden = torch.tensor([1.0, 0, 0, 0]).expand(1, 6, 4)
    labels = torch.tensor([[30, 5, 9, 20, 0, 39]])
    ones = torch.ones(1, 6)
    for dtype in (torch.float32, torch.float64):
        rank = draft_loss_stats(
            hidden.to(dtype), weight.to(dtype), labels, ones, ones.sum(), torch.arange(6),
            torch.tensor(6),
        )[2]  # fmt: skip
        assert rank.tolist() == [[0, 1, 2, 3, 4, 39]]


def test_only_supervised_rows_are_looked_at() -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    wanted = gradient(case)
    case.hidden[case.weights == 0] = float("nan")
    case.labels[case.weights == 0] = -100
    found = gradient(case)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])


def test_projected_row_of_weight_0_has_no_influence() -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    wanted = gradient(case)
    every = torch.arange(48)
    case = dataclasses.replace(case, rows=every, n_rows=torch.tensor(48))
    case.hidden[case.weights == 0] = float("nan")
    found = gradient(case)
    assert error(found[0], wanted[0]) < 1e-6
    assert error(found[1], wanted[1]) < 1e-6


def test_padding_of_the_head_is_never_read() -> None:
    case = make_case(6, 8, 24, 500, torch.float32, valid=470)
    wanted = gradient(dataclasses.replace(case, weight=case.weight[:470].clone()))
    case.weight[470:] = float("nan")
    found = gradient(case, valid_vocab=470)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
    rank = draft_loss_stats(*arguments(case), valid_vocab=470)[2]
    assert (rank[case.weights == 0] == 470).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_state_shows_and_stays_in_its_row(value: float) -> None:
    case = make_case(6, 8, 24, 500, torch.float32)
    clean = gradient(case)[1]
    a, k = divmod(case.rows[3].item(), 8)
    case.hidden[a, k] = value
    loss, found = gradient(case)
    assert not loss.isfinite()
    found[a, k], clean[a, k] = 0, 0
    assert found.equal(clean)
    acc = new_accumulator("cpu")
    for options in ({}, {"dpace_alpha": 0.5}):
        acc.zero_()
        draft_loss(*arguments(case), metrics=acc, **options)
        assert acc[WORD["nonfinite_values"]] > 0
    assert draft_loss_stats(*arguments(case))[2][a, k] == 500


def test_non_finite_teacher_shows() -> None:
    case = make_case(3, 4, 8, 50, torch.float32)
    case.teacher_hidden.fill_(float("nan"))
    teacher = {"teacher_hidden": case.teacher_hidden, "teacher_index": case.teacher_index}
    assert draft_loss(*arguments(case), kl_weight=1.0, **teacher).isnan()
    assert draft_loss(*arguments(case), kl_weight=0.0, **teacher).isfinite()


def test_extreme_logits() -> None:
    case = make_case(4, 4, 16, 200, torch.float32)
    case = dataclasses.replace(case, hidden=case.hidden * 1e3)
    wanted = case.run(draft_loss_stats_naive, torch.float64, cap_lambda=0.5)
    found = case.run(draft_loss_stats, torch.float32, cap_lambda=0.5)
    assert error(found["loss"], wanted["loss"]) < 1e-5
    assert found["gradient"].isfinite().all() and found["terms"].isfinite().all()


def test_teacher_equal_to_drafter_has_no_kl() -> None:
    case = make_case(3, 4, 8, 50, torch.float32)
    case = dataclasses.replace(
        case, teacher_hidden=case.hidden.flatten(0, 1), teacher_index=torch.arange(12).view(3, 4)
    )
    found = case.run(draft_loss_stats, torch.float32, ce_weight=0.0, kl_weight=1.0)
    assert found["loss"].abs() < 1e-6
    assert found["gradient"].abs().max() < 1e-6


def test_wrong_arguments_are_refused() -> None:
    case = make_case(3, 4, 8, 50, torch.float32)
    with pytest.raises(ValueError, match="kl: found 'rkl', want forward, reverse, js, tv"):
        draft_loss(*arguments(case), kl="rkl")
    with pytest.raises(ValueError, match="kl_weight"):
        draft_loss(*arguments(case), kl_weight=1.0)
    frozen = dataclasses.replace(case, weight=case.weight.clone().requires_grad_())
    with pytest.raises(ValueError, match="weight: found requires_grad"):
        draft_loss(*arguments(frozen))
    with pytest.raises(IndexError, match="labels: found 49 .* want 0 to 39"):
        labels = torch.full_like(case.labels, 49)
        draft_loss(*arguments(dataclasses.replace(case, labels=labels)), valid_vocab=40)
    with pytest.raises(IndexError, match="rows: found 12"):
        rows = torch.full_like(case.rows, 12)
        draft_loss(*arguments(dataclasses.replace(case, rows=rows)))
    with pytest.raises(RuntimeError, match="weight: found Double, want Float"):
        draft_loss(*arguments(dataclasses.replace(case, weight=case.weight.double())))
    with pytest.raises(RuntimeError, match="chunk_rows"):
        draft_loss(*arguments(case), chunk_rows=0)


def test_baseline_instruction_set() -> None:
    """The kernels that a processor without AVX2 runs pass the comparison too."""
    selected = f"{__file__}::test_matches_naive_in_fp64"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", selected]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
