import pytest
import torch

from dflash_ext import ops
from dflash_ext.ops.metric_publish.naive import metric_publish_naive


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 4, 10**12])
def test_equals_naive(rows, start, device):
    mine, naive = [
        (
            torch.zeros(7, dtype=torch.int64, device=device),
            torch.zeros(rows, 8, dtype=torch.int64, device=device),
            torch.tensor(start, device=device),
        )
        for _ in range(2)
    ]
    for i in range(7):
        for acc, _, _ in (mine, naive):
            acc += torch.arange(7, device=device) * (i + 1) - 3
        ops.metric_publish(*mine)
        metric_publish_naive(*naive)
        assert all(torch.equal(a, b) for a, b in zip(mine, naive, strict=True))
        assert not mine[0].any()
        assert mine[1][(start + i) % rows, -1] == start + i


@pytest.mark.parametrize(
    ("acc", "staging", "step", "message"),
    [
        ((3,), (2, 5), torch.tensor(0), "staging: found shape [2, 5], want [2, 4]"),
        ((3,), (0, 4), torch.tensor(0), "staging: found no rows"),
        ((3,), (2, 4), torch.tensor([0]), "step: found shape [1], want []"),
        ((3,), (2, 4), torch.tensor(0.0), "step: found Float, want Long"),
        ((3,), (2, 4), torch.tensor(-1), "step: found -1, want >= 0"),
        ((3, 1), (2, 4), torch.tensor(0), "acc: found 2 dimensions, want 1"),
    ],
)
def test_rejects(acc, staging, step, message):
    with pytest.raises(RuntimeError) as error:
        ops.metric_publish(
            torch.zeros(acc, dtype=torch.int64), torch.zeros(staging, dtype=torch.int64), step
        )
    assert message in str(error.value)


def test_opcheck(device):
    arguments = (
        torch.arange(7, device=device),
        torch.zeros(3, 8, dtype=torch.int64, device=device),
        torch.tensor(4, device=device),
    )
    torch.library.opcheck(torch.ops.dflash_ext.metric_publish.default, arguments)
