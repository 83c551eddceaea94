"""draft_loss on GPUs: the comparisons of test_draft_loss.py, and what only a GPU has to stand."""

import dataclasses

import pytest
import torch
from cuda_waits import no_syncs
from draft_loss_cases import (
    EVERYTHING,
    OPTIONS,
    Case,
    arguments,
    error,
    errors,
    gradient,
    make_case,
    plain_16bit,
)

from dflash_ext.ops import draft_loss
from dflash_ext.ops.draft_loss import draft_loss_stats
from dflash_ext.ops.draft_loss.naive import draft_loss_stats_naive
from dflash_ext.ops.draft_loss.teacher import chunk_index, most_teachers, share_teachers
from dflash_ext.ops.metric_add import WORD, new_accumulator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("cuda_by_default"),
]

NAN, INF = float("nan"), float("inf")
HALVES = [torch.bfloat16, torch.float16]
ODD_OPTIONS = [{"logit_scale": -0.5, "kl_weight": 1.0}, {"ce_weight": -1.0}]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # the largest relative error


def exact_case(
    blocks: int, slots: int, vocab: int, dtype: torch.dtype, valid: int | None = None
) -> Case:
    """Logits are integers of at most 128, which 16 bits hold exactly: many of them are tied."""
    case = make_case(blocks, slots, 32, vocab, dtype, valid)
    hidden = torch.randint(-2, 3, case.hidden.shape)
    weight = torch.randint(-2, 3, case.weight.shape)
    labels = (hidden.double() @ weight[:valid].double().T).argmax(-1)
    random = torch.randint(vocab if valid is None else valid, labels.shape)
    return dataclasses.replace(
        case,
        hidden=hidden.to(dtype),
        weight=weight.to(dtype),
        labels=torch.where(torch.rand(labels.shape) < 0.5, labels, random),
        teacher_hidden=torch.randint(-2, 3, case.teacher_hidden.shape).to(dtype),
    )


def assert_exact(case: Case, dtype: torch.dtype, **options) -> None:
    """For logits that are exact, only the gradient is rounded: of each logit, and at the end.

    Where one logit's outweighs the others', both roundings may come near their largest.
    """
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, dtype, **options)
    assert found["rank"].equal(wanted["rank"])
    for name in wanted:
        # With a vocabulary of one id, all but lse is 0.
        limit, least = (2 * ROUNDING[dtype], 1e-2) if name == "gradient" else (1e-5, 1.0)
        difference = (found[name] - wanted[name]).norm()
        assert difference <= limit * wanted[name].norm().clamp_min(least), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_matches_naive_in_fp64(nan_poison, options, dtype, limit):
    case = make_case(7, 5, 33, 1000, dtype, options.get("valid_vocab"))
    wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
    found = case.run(draft_loss_stats, dtype, **options)
    assert found["rank"].equal(wanted["rank"])
    assert max(errors(found, wanted).values()) <= limit, errors(found, wanted)


@pytest.mark.parametrize("options", [*OPTIONS, *ODD_OPTIONS], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_exact_logits_of_16_bits(nan_poison, options, dtype):
    assert_exact(exact_case(7, 5, 1000, dtype, options.get("valid_vocab")), dtype, **options)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 2047, 49_152, 128_256, 151_936, 248_077, 248_320])
@pytest.mark.parametrize("options", [{}, {"kl_weight": 0.5, "cap_lambda": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_vocabularies(nan_poison, vocab, options, dtype):
    assert_exact(exact_case(5, 4, vocab, dtype), dtype, **options)


@pytest.mark.parametrize("vocab", [7, 9, 2047])
@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_padding_does_not_count_under_a_soft_cap(nan_poison, vocab, kl_weight, dtype):
    options = {"softcap": 3.0, "kl_weight": kl_weight, "cap_lambda": 0.5}
    assert_exact(exact_case(5, 4, vocab, dtype), dtype, **options)


@pytest.mark.parametrize(
    "vocab, kl_weight", [(300_001, 0.5), (600_001, 0.0), (600_001, 0.5), (1_300_000, 0.5)]
)
def test_vocabularies_of_other_plans(vocab, kl_weight):
    """Too large for registers, for three stages, and for a kernel that reads a row once."""
    case = exact_case(2, 3, vocab, torch.bfloat16)
    assert_exact(case, torch.bfloat16, kl_weight=kl_weight, cap_lambda=0.5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bits_are_as_good_as_plain_torch(dtype):
    case = make_case(16, 16, 256, 50_000, dtype)
    plain = error(plain_16bit(case), case.run(draft_loss_stats_naive, torch.float64)["gradient"])
    for options in ({}, EVERYTHING | {"valid_vocab": 50_000}):
        wanted = case.run(draft_loss_stats_naive, torch.float64, **options)
        found = case.run(draft_loss_stats, dtype, **options)
        assert error(found["gradient"], wanted["gradient"]) <= 2 * plain
        # Only CE and KL: a rank that rounding changes turns CAP on or off.
        terms = (values["terms"][..., 1:3] for values in (found, wanted))
        assert error(*terms) <= 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_opcheck(blocks, dtype):
    case = make_case(blocks, 4, 8, 37, dtype)
    args = (*arguments(case, case.hidden.requires_grad_()), case.teacher_hidden, case.teacher_index)
    options = {"kl_weight": 1.0, "dpace_alpha": 0.5, "softcap": 3.0}
    torch.library.opcheck(torch.ops.dflash_ext.draft_loss.default, args, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeats_bit_for_bit_with_metrics_on_or_off(nan_poison, dtype):
    case = make_case(64, 16, 64, 20_000, dtype)
    options = {"cap_lambda": 0.5, "dpace_alpha": 0.3}
    wanted = gradient(case, **options)
    for turn in range(50):
        acc = new_accumulator("cuda")
        measured = turn % 2 == 0
        found = gradient(case, metrics=acc, measured=measured, **options)
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
        slots = (case.weights > 0).sum().item()
        assert acc[WORD["slots"]] == (slots if measured else 0)
    with torch.no_grad():
        assert draft_loss(*arguments(case), **options).equal(wanted[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_by_the_incoming_gradient(dtype):
    case = make_case(3, 4, 8, 50, dtype)
    wanted = (gradient(case)[1].float() * -0.3).to(dtype)
    assert gradient(case, factor=-0.3)[1].equal(wanted)


@pytest.mark.parametrize("chunk_rows", [1, 3, 16, 1000])
def test_chunks_change_nothing_but_rounding(chunk_rows):
    case = make_case(6, 8, 24, 500, torch.float32)
    options = {"kl_weight": 1.0, "dpace_alpha": 0.5}
    wanted = case.run(draft_loss_stats, torch.float32, **options)
    found = case.run(draft_loss_stats, torch.float32, chunk_rows=chunk_rows, **options)
    assert max(errors(found, wanted).values()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strided_views(dtype):
    case = make_case(5, 6, 16, 300, dtype)
    wanted = gradient(case)
    wide = torch.randn(case.weight.shape[0], 40).to(dtype)
    wide[:, 3:19] = case.weight
    for hidden in (
        case.hidden.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        case.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([case.hidden, case.hidden], -1)[..., 16:],
        torch.cat([case.hidden, case.hidden], -1)[..., :16],
    ):
        strided = dataclasses.replace(
            case,
            hidden=hidden,
            weight=wide[:, 3:19],
            labels=case.labels.T.contiguous().T,
            weights=case.weights.T.contiguous().T,
        )
        found = gradient(strided)
        limit = 1e-6 if dtype == torch.float32 else ROUNDING[dtype] / 2
        assert error(found[0], wanted[0]) < limit and error(found[1], wanted[1]) < limit


@pytest.mark.parametrize("how", ["no rows", "no weights", "no blocks", "no capacity"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"dpace_alpha": 0.5, "cap_lambda": 1.0}], ids=str)
def test_nothing_to_learn_is_an_attached_zero(nan_poison, how, dtype, options):
    case = make_case(0 if how == "no blocks" else 3, 4, 8, 50, dtype)
    if how in ("no rows", "no capacity"):
        case.weights.zero_()
        case.n_rows.zero_()
    if how == "no capacity":
        case = dataclasses.replace(case, rows=case.rows[:0])
    if how == "no weights":
        case.weights.zero_()
    hidden = case.hidden.clone().requires_grad_()
    loss = draft_loss(*arguments(case, hidden), metrics=new_accumulator("cuda"), **options)
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_ties_rank_by_lowest_index(dtype):
    for vocab in (40, 4001):
        weight = torch.zeros(vocab, 4)
        weight[[5, 9, 20], 0] = 1.0
        weight[30, 0] = 2.0
        for scale, wanted in ((1.0, [0, 1, 2, 3, 4, 39]), (0.0, [30, 5, 9, 20, 0, 39])):
            hidden = torch.tensor([scale, 0, 0, 0]).expand(1, 6, 4)
            labels = torch.tensor([[30, 5, 9, 20, 0, 39]])
            ones = torch.ones(1, 6)
            rank = draft_loss_stats(
                hidden.to(dtype), weight.to(dtype), labels, ones, ones.sum(), torch.arange(6),
                torch.tensor(6),
            )[2]  # fmt: skip
            assert rank.tolist() == [wanted]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_only_supervised_rows_are_looked_at(dtype):
    case = make_case(6, 8, 24, 500, dtype)
    wanted = gradient(case)
    case.hidden[case.weights == 0] = NAN
    case.labels[case.weights == 0] = -100
    found = gradient(case)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
    every = torch.arange(48)
    case = dataclasses.replace(case, rows=every, n_rows=torch.tensor(48))
    case.labels[case.weights == 0] = 0
    found = gradient(case)
    limit = 1e-6 if dtype == torch.float32 else ROUNDING[dtype] / 2
    assert error(found[0], wanted[0]) < limit and error(found[1], wanted[1]) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab, valid", [(500, 470), (500, 472), (500, 3)])
def test_padding_of_the_head_is_never_read(dtype, vocab, valid):
    case = make_case(6, 8, 24, vocab, dtype, valid=valid)
    wanted = gradient(dataclasses.replace(case, weight=case.weight[:valid].clone()))
    case.weight[valid:] = NAN
    found = gradient(case, valid_vocab=valid)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
    rank = draft_loss_stats(*arguments(case), valid_vocab=valid)[2]
    assert (rank[case.weights == 0] == valid).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0}, {"dpace_alpha": 0.5, "cap_lambda": 0.5}], ids=str
)
@pytest.mark.parametrize("how", [NAN, INF, "label", "large label"])
def test_bad_row_shows_and_stays_in_its_row(dtype, options, how):
    case = make_case(6, 8, 24, 500, dtype)
    clean = gradient(case, **options)[1]
    a, k = divmod(case.rows[3].item(), 8)
    if isinstance(how, float):
        case.hidden[a, k] = how
    else:
        case.labels[a, k] = -1 if how == "label" else 500
    acc = new_accumulator("cuda")
    loss, found = gradient(case, metrics=acc, **options)
    assert not loss.isfinite()
    assert acc[WORD["nonfinite_values"]] > 0
    assert draft_loss_stats(*arguments(case), **options)[2][a, k] == 500
    if "dpace_alpha" not in options:  # else it changes its block's weights
        found[a, k], clean[a, k] = 0, 0
        assert found.equal(clean)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=str)
def test_bad_indices_show(options):
    case = make_case(6, 8, 24, 500, torch.bfloat16)
    for rows in (case.rows.clone().fill_(48), case.rows.clone().fill_(-1)):
        loss, _ = gradient(dataclasses.replace(case, rows=rows), **options)
        assert loss.isnan()
    count = torch.tensor(case.rows.numel() + 1)
    assert gradient(dataclasses.replace(case, n_rows=count), **options)[0].isnan()
    teacher = {"teacher_hidden": case.teacher_hidden, "kl_weight": 1.0} | options
    for index in (50, -1):
        index = torch.full_like(case.teacher_index, index)
        assert gradient(case, teacher_index=index, **teacher)[0].isnan()
    bad = torch.full_like(case.teacher_hidden, NAN)
    teacher["teacher_hidden"] = bad
    assert gradient(case, teacher_index=case.teacher_index, **teacher)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_extreme_logits(dtype):
    case = make_case(4, 4, 16, 200, dtype)
    case = dataclasses.replace(case, hidden=case.hidden * 1e3)
    wanted = case.run(draft_loss_stats_naive, torch.float64, cap_lambda=0.5)
    found = case.run(draft_loss_stats, dtype, cap_lambda=0.5)
    limit = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
    assert error(found["loss"], wanted["loss"]) < limit
    assert found["gradient"].isfinite().all() and found["terms"].isfinite().all()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("chunk_rows", [9, 16, 1000])
@pytest.mark.parametrize(
    "options",
    [{"kl_weight": 1.0}, {"kl_weight": 0.5, "softcap": 30.0}, {"kl_weight": 0.5, "kl": "reverse"}],
    ids=str,
)
def test_shared_teachers_change_no_bit(nan_poison, options, chunk_rows, dtype):
    """Logits are exact, whatever the shape of their product."""
    case = exact_case(8, 6, 1003, dtype)
    index = chunk_index(case.teacher_index, case.rows, case.n_rows, 50, chunk_rows)
    most = most_teachers(index, 50)
    options = options | {"chunk_rows": chunk_rows}
    wanted = case.run(draft_loss_stats, dtype, **options)
    for bound in (most, most + 3):
        found = case.run(draft_loss_stats, dtype, most_teachers=bound, **options)
        for name in wanted:
            assert found[name].equal(wanted[name]), name
    with no_syncs():
        share_teachers(case.teacher_index, case.rows, case.n_rows, 50, chunk_rows, most)
    found = case.run(draft_loss_stats, dtype, most_teachers=most - 1, **options)
    assert found["loss"].isnan()


def test_teacher_equal_to_drafter_has_no_kl():
    case = make_case(3, 4, 8, 50, torch.bfloat16)
    case = dataclasses.replace(
        case, teacher_hidden=case.hidden.flatten(0, 1), teacher_index=torch.arange(12).view(3, 4)
    )
    found = case.run(draft_loss_stats, torch.bfloat16, ce_weight=0.0, kl_weight=1.0)
    assert found["loss"].abs() < 1e-6
    assert found["gradient"].abs().max() < 1e-6


def test_more_than_2_31_logits():
    vocab, blocks = 248_320, 8971
    case = exact_case(blocks, 1, vocab, torch.bfloat16)
    assert blocks * vocab > 2**31
    every = dataclasses.replace(
        case,
        weights=torch.ones(blocks, 1),
        rows=torch.arange(blocks),
        n_rows=torch.tensor(blocks),
    )
    found = every.run(draft_loss_stats, torch.bfloat16, chunk_rows=blocks)
    some = torch.tensor([0, 1, 4095, 8647, 8649, 8969, 8970])
    few = dataclasses.replace(
        every,
        hidden=every.hidden[some],
        labels=every.labels[some],
        weights=every.weights[some],
        teacher_index=every.teacher_index[some],
        rows=torch.arange(7),
        n_rows=torch.tensor(7),
    )
    wanted = few.run(draft_loss_stats_naive, torch.float64)
    assert found["rank"][some].equal(wanted["rank"])
    assert error(found["terms"][some], wanted["terms"]) < 1e-5
    scaled = found["gradient"][some] * blocks / 7
    assert error(scaled, wanted["gradient"]) < ROUNDING[torch.bfloat16]
