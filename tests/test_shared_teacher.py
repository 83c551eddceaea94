"""Teachers that rows of one chunk share: which they are, and how many on the host."""

import pytest
import torch
from draft_loss_cases import arguments, make_case
from test_loss import Case

from dflash_ext.drafter import loss as loss_module
from dflash_ext.drafter.loss import (
    Objective,
    TeacherChunks,
    count_teachers,
    plan_parts,
    teacher_chunks,
)
from dflash_ext.ops.draft_loss.teacher import chunk_index, most_teachers, share_teachers

pytestmark = pytest.mark.usefixtures("nan_poison")


@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 100])
@pytest.mark.parametrize("tokens", [1, 9, 60])
def test_every_live_row_finds_its_teacher_among_those_of_its_chunk(tokens, chunk_rows):
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(tokens, (6, 5), generator=generator)
    rows = torch.cat([torch.randperm(30, generator=generator)[:23], torch.zeros(5).long()])
    n_rows = torch.tensor(23)
    most = most_teachers(chunk_index(index, rows, n_rows, tokens, chunk_rows), tokens)
    found, place = share_teachers(index, rows, n_rows, tokens, chunk_rows, most)
    assert found.shape == (-(-28 // chunk_rows), most) and place.dtype == torch.int32
    for row in range(23):
        chunk = found[row // chunk_rows]
        assert chunk[place[row]] == index.flatten()[rows[row]]
    assert (place[23:] == -1).all()
    for chunk in found:
        named = chunk[chunk >= 0]
        assert torch.equal(named, named.unique()) and (chunk[named.numel() :] == -1).all()
    assert (found >= 0).all(1).any()  # of as many as the bound


def test_what_has_no_room_or_is_out_of_range_has_no_place():
    index = torch.tensor([[0, 5, 3, -1], [7, 3, 9, 4]])
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 99])
    found, place = share_teachers(index, rows, torch.tensor(8), 8, 8, 3)
    assert found.tolist() == [[0, 3, 5]]
    assert place.tolist() == [0, 2, 1, -1, 3, 1, -1, -1]  # 3: the fourth has no room


def test_nothing_to_share():
    none = torch.zeros(0, dtype=torch.int64)
    found, place = share_teachers(torch.zeros(2, 3).long(), none, torch.tensor(0), 5, 4, 2)
    assert found.shape == (0, 2) and place.shape == (0,)


def test_a_cpu_takes_the_shared_teachers_and_changes_no_bit():
    case = make_case(5, 4, 16, 50, torch.float32)
    shared = share_teachers(case.teacher_index, case.rows, case.n_rows, 50, 6, 6)
    plain = (*arguments(case), case.teacher_hidden, case.teacher_index)
    options = {"kl_weight": 0.5, "chunk_rows": 6}
    op = torch.ops.dflash_ext.draft_loss.default
    results = [op(*plain, **options), op(*plain, *shared, **options)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(RuntimeError, match="teacher_tokens, teacher_place"):
        op(*plain, shared[0], **options)
    with pytest.raises(RuntimeError, match="teacher_tokens: found"):
        op(*plain, *shared, kl_weight=0.5, chunk_rows=7)


@pytest.mark.parametrize("budget, group", [(22, None), (100, None), (20, 5), (22, 5)])
def test_host_counts_equal_chunks_and_bounds_their_teachers(monkeypatch, budget, group):
    monkeypatch.setattr(loss_module, "ROW_ALIGN", 4)
    monkeypatch.setattr(loss_module, "TEACHER_GRAIN", 2)
    case = Case(kl_weight=0.3)
    parts = list(plan_parts(case.plan, group, None))

    def most_of(rows: int) -> int:
        sizes = []
        for part in parts:
            picked = part.teacher_index.flatten()[part.rows[: int(part.n_rows)]]
            sizes += [chunk.unique().numel() for chunk in picked.split(rows)]
        return max(sizes)

    found = count_teachers(parts, 12, budget)
    assert found is not None and found.rows in (4, 8, 12)
    assert most_of(found.rows) <= found.most < most_of(found.rows) + 2
    assert found.rows + found.most <= budget
    larger = found.rows + 4  # would have been taken if there were room
    assert larger > 12 or larger + most_of(larger) > budget
    assert count_teachers(parts, 2, 4) is None  # two rows cannot share enough


def test_host_comes_to_an_end_with_many_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "ROW_ALIGN", 4)
    monkeypatch.setattr(loss_module, "TEACHER_GRAIN", 2)
    case = Case(kl_weight=0.3)  # 128 rows: one chunk more makes none shorter
    assert count_teachers([case.plan], 12, 20) is None


def test_a_cpu_does_not_share():
    case = Case(kl_weight=0.3)
    assert teacher_chunks(case.plan, case.train, case.head, None) is None


def test_the_objective_passes_them_on(monkeypatch):
    case, passed = Case(kl_weight=0.3), []
    run = loss_module.draft_loss_stats

    def spy(*positional, **options):
        passed.append((options["chunk_rows"], options["most_teachers"]))
        return run(*positional, **options)

    monkeypatch.setattr(loss_module, "draft_loss_stats", spy)
    objective = Objective(case.train, case.spec.layout)
    for teachers in (None, TeacherChunks(24, 16)):
        loss_module.train_batch(
            case.model, case.head, case.plan, case.hidden,
            objective=objective, last_hidden=case.last, teachers=teachers,
        )  # fmt: skip
    assert passed == [(None, None), (24, 16)]
