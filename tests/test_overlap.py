"""BackwardSync: the same sums as after the step, begun while its backward pass runs."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from drafter_cases import (
    make_plan,
    random_examples,
    random_head,
    random_hidden,
    random_model,
    small_spec,
)
from torch import Tensor

from dflash_ext.config import TrainConfig
from dflash_ext.drafter import fused
from dflash_ext.drafter.loss import Objective, forward_backward
from dflash_ext.drafter.overlap import FC_BLOCKS, BackwardSync
from dflash_ext.grad_sync import GradSync, make_store
from dflash_ext.optim import DrafterOptimizer, global_norm

WORLD = 2


class Recorded(GradSync):
    """Notes the size of each part that it sums."""

    def __init__(self, rank: int, world: int, store: dist.Store) -> None:
        super().__init__(rank, world, store, timeout_s=20.0)
        self.parts: list[int] = []

    def start(self, grads: Sequence[Tensor]) -> None:
        self.parts.append(sum(grad.numel() for grad in grads))
        super().start(grads)


def gradients(
    *, overlapped: bool, group: int | None, flat: bool, recompute: bool = False, steps: int = 2
) -> list[tuple[dict[str, Tensor], Recorded]]:
    """By rank, each on its own data: gradients of the last step, and the sync that summed them."""
    store = make_store()
    results: list[tuple[dict[str, Tensor], Recorded] | Exception] = [RuntimeError("hangs")] * WORLD

    def drafter(rank: int) -> tuple[dict[str, Tensor], Recorded]:
        spec = small_spec()
        model = random_model(spec)
        model.recompute = recompute
        optimizer = DrafterOptimizer(model.named_parameters(), TrainConfig(), 10, flat=flat)
        sync = Recorded(rank, WORLD, store)
        sync.connect()
        overlap = BackwardSync(model, sync, optimizer.params) if overlapped else None
        found = {}
        for step in range(steps):
            plan = make_plan(random_examples(seed=10 * step + rank), spec)
            forward_backward(
                model,
                random_head(),
                plan,
                random_hidden(plan, spec, seed=rank),
                objective=Objective(TrainConfig(), spec.layout),
                group=group,
                overlap=overlap,
            )
            if overlap is not None:
                norm = overlap.finish()
                assert torch.equal(norm, global_norm([p.grad for p in optimizer.params]))
            else:
                sync.all_reduce([p.grad for p in optimizer.params if p.grad is not None])
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step(step)
        sync.close()
        return found, sync

    def target(rank: int) -> None:
        try:
            results[rank] = drafter(rank)
        except Exception as error:
            results[rank] = error

    run_threads(target)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]


def run_threads(target: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=target, args=(r,), daemon=True) for r in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)


@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_same_bits_as_sums_after_the_step(group: int | None, flat: bool, recompute: bool) -> None:
    options = {"group": group, "flat": flat, "recompute": recompute}
    wanted = gradients(overlapped=False, **options)
    found = gradients(overlapped=True, **options)
    for rank in range(WORLD):
        for name, want in wanted[rank][0].items():
            assert torch.equal(found[rank][0][name], want), name
            assert torch.equal(found[0][0][name], found[rank][0][name]), name


@pytest.mark.parametrize("flat", [False, True])
def test_layers_go_last_to_first_and_what_the_context_uses_at_the_end(flat: bool) -> None:
    spec = small_spec()
    model = random_model(spec)
    size = {name: p.numel() for name, p in model.named_parameters()}
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    shared = sum(n for name, n in matrices.items() if "k_proj" in name or "v_proj" in name)
    early = [
        sum(n for name, n in matrices.items() if f"layers.{i}." in name) - shared // spec.num_layers
        for i in range(spec.num_layers)
    ]
    vectors = sum(size.values()) - sum(matrices.values())
    fc = matrices["fc.weight"]
    blocks = [fc // FC_BLOCKS] * FC_BLOCKS
    by_layer = [shared // spec.num_layers] * spec.num_layers
    rest = [*blocks, *by_layer, vectors] if flat else [shared, fc + vectors]
    wanted = [*early[::-1], *rest]
    for _, sync in gradients(overlapped=True, group=5, flat=flat):
        assert sync.parts == wanted * 2


def test_sums_begin_before_the_backward_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has no gradient yet when the last layer's sum begins."""
    begun: list[tuple[int, bool]] = []
    begin = BackwardSync._begin_down_to

    def noted(self: BackwardSync, index: int) -> None:
        first = self._layers[0][0]
        begun.append((index, first.grad is None))
        begin(self, index)

    monkeypatch.setattr(BackwardSync, "_begin_down_to", noted)
    gradients(overlapped=True, group=None, flat=False, steps=1)
    assert sorted(begun) == [(0, False)] * 2 + [(1, True)] * 2 + [(2, True)] * 2


def test_sums_begin_before_the_next_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fc's blocks, then of each layer's keys and values; each complete gradient has a norm."""
    log: dict[int, list[str]] = defaultdict(list)  # by thread
    add, start = fused.add_matrix_grad, BackwardSync._start

    def noted_add(weights: Sequence[Tensor], grad_out: Tensor, x: Tensor) -> None:
        log[threading.get_ident()].append(f"gradient of {weights[0].shape[0]} rows")
        add(weights, grad_out, x)

    def noted(self: BackwardSync, grads: list[Tensor], params: list[torch.nn.Parameter]) -> None:
        log[threading.get_ident()].append(f"sum of {len(grads)}, {len(params)} complete")
        start(self, grads, params)

    monkeypatch.setattr(fused, "add_matrix_grad", noted_add)
    monkeypatch.setattr(BackwardSync, "_start", noted)
    gradients(overlapped=True, group=5, flat=True, steps=1)
    spec = small_spec()
    kv_rows = spec.num_key_value_heads * spec.head_dim
    vectors = sum(p.dim() == 1 for p in random_model(spec).parameters())
    wanted = [
        f"gradient of {spec.hidden_size} rows",
        *["sum of 1, 0 complete"] * (FC_BLOCKS - 1),
        "sum of 1, 1 complete",
        *[f"gradient of {kv_rows} rows", "sum of 2, 2 complete"] * spec.num_layers,
        f"sum of {vectors}, {vectors} complete",
    ]
    assert len(log) == WORLD
    assert all(found[-len(wanted) :] == wanted for found in log.values())


def test_error_of_a_sum_leaves_the_backward_pass() -> None:
    spec = small_spec()
    model = random_model(spec)
    optimizer = DrafterOptimizer(model.named_parameters(), TrainConfig(), 10)
    sync = GradSync(0, 2, make_store(), timeout_s=0.2)
    overlap = BackwardSync(model, sync, optimizer.params)
    plan = make_plan(random_examples(), spec)
    objective = Objective(TrainConfig(), spec.layout)
    args = (model, random_head(), plan, random_hidden(plan, spec))
    with pytest.raises(RuntimeError, match=r"rank 0: all-reduce timed out .* waiting for rank 1"):
        forward_backward(*args, objective=objective, overlap=overlap)
