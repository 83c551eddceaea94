import pytest
import torch

from dflash_ext import ops
from dflash_ext.ops.pack_hidden.naive import pack_hidden_naive

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DIRTY = 7.0


def make_layers(num_layers, batch, length, width, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(batch * 100 + length)
    return [
        torch.randn(batch, length, width, generator=generator).to(dtype).to(device)
        for _ in range(num_layers)
    ]


def make_index(capacity, n_rows, sources, device="cpu"):
    """Random source rows with holes; rows after n_rows are never read, so they hold nonsense."""
    generator = torch.Generator().manual_seed(capacity)
    index = torch.randint(-1, max(sources, 0), (capacity,), generator=generator)
    index[n_rows:] = 10**12
    return index.to(device)


def make_slot(num_layers, capacity, width, dtype, layout, device="cpu"):
    shape = (num_layers, capacity, width) if layout == "split" else (capacity, num_layers * width)
    return torch.full(shape, DIRTY, dtype=dtype, device=device)


def run_both(layers, index, out, n_rows, high_water, first_layer=0):
    """(out, high_water) of the op and of the naive one."""
    results = []
    for function in (ops.pack_hidden, pack_hidden_naive):
        slot, mark = out.clone(), torch.tensor(high_water, device=out.device)
        n = torch.tensor(n_rows, device=out.device)
        function(layers, index, slot, n_rows=n, high_water=mark, first_layer=first_layer)
        results.append((slot, mark))
    return results


@pytest.mark.parametrize("layout", ["concat", "split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("capacity", "n_rows", "high_water"),
    [(1, 1, 0), (37, 23, 37), (37, 23, 31), (37, 23, 5), (37, 37, 37), (64, 0, 64), (0, 0, 0)],
)
def test_equals_naive(layout, dtype, capacity, n_rows, high_water, device):
    layers = make_layers(3, 4, 9, 13, dtype, device)
    index = make_index(capacity, n_rows, 36, device)
    out = make_slot(3, capacity, 13, dtype, layout, device)
    (mine, my_mark), (naive, naive_mark) = run_both(layers, index, out, n_rows, high_water)
    assert torch.equal(mine, naive)
    assert my_mark == naive_mark == n_rows
    rows = mine if layout == "concat" else mine.transpose(0, 1).reshape(capacity, 39)
    assert (rows[n_rows:high_water] == 0).all()
    assert (rows[max(n_rows, high_water) :] == DIRTY).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 24, 136, 1032])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_widths(dtype, width, device):
    layers = make_layers(2, 3, 40, width, dtype, device)
    index = make_index(150, 140, 120, device)
    out = make_slot(2, 150, width, dtype, "concat", device)
    (mine, _), (naive, _) = run_both(layers, index, out, 140, 150)
    assert torch.equal(mine, naive)


def test_larger_than_a_thread_chunk(device):
    layers = make_layers(2, 8, 200, 96, device=device)
    index = make_index(1500, 1400, 1600, device)
    out = make_slot(2, 1500, 96, None, "concat", device)
    (mine, _), (naive, _) = run_both(layers, index, out, 1400, 0)
    assert torch.equal(mine, naive)


@pytest.mark.parametrize("layout", ["concat", "split"])
def test_many_layers(layout, device):
    layers = make_layers(37, 2, 5, 6, device=device)
    index = make_index(12, 8, 10, device)
    out = make_slot(39, 12, 6, None, layout, device)
    (mine, mark), (naive, naive_mark) = run_both(layers, index, out, 8, 11, first_layer=2)
    assert torch.equal(mine, naive)
    assert mark == naive_mark


@pytest.mark.parametrize("layout", ["concat", "split"])
def test_strided_layers_and_slot(layout, device):
    big = make_layers(2, 4, 18, 26, device=device)
    layers = [big[0][1:4, ::2, 3:16], big[1].transpose(0, 1)[:9, :3, :13].transpose(0, 1)]
    assert [layer.shape for layer in layers] == [(3, 9, 13)] * 2
    index = make_index(21, 20, 27, device)
    wide = torch.full((3, 21, 60), DIRTY, device=device)
    out = wide[:2, :, 5:18] if layout == "split" else wide[1, :, 4:30]
    n_rows, mark = torch.tensor(20, device=device), torch.tensor(21, device=device)
    ops.pack_hidden(layers, index, out, n_rows=n_rows, high_water=mark)
    contiguous = [layer.contiguous() for layer in layers]
    expected = make_slot(2, 21, 13, None, layout, device)
    mark.fill_(21)
    pack_hidden_naive(contiguous, index, expected, n_rows=n_rows, high_water=mark)
    assert torch.equal(out, expected)
    assert (wide != DIRTY).sum() <= out.numel()


def test_expanded_layer(device):
    layers = [torch.randn(1, 1, 5, device=device).expand(3, 4, 5)]
    index = torch.arange(12, device=device)
    (mine, _), (naive, _) = run_both(layers, index, torch.zeros(12, 5, device=device), 12, 0)
    assert torch.equal(mine, naive)


def test_a_call_per_layer_equals_one_call(device):
    layers = make_layers(3, 2, 8, 5, device=device)
    index = make_index(16, 6, 16, device)
    whole, parts = (make_slot(3, 16, 5, None, "concat", device) for _ in range(2))
    n, mark_whole, mark_parts = (torch.tensor(rows, device=device) for rows in (6, 16, 16))
    ops.pack_hidden(layers, index, whole, n_rows=n, high_water=mark_whole)
    for i, layer in enumerate(layers):
        ops.pack_hidden([layer], index, parts, n_rows=n, high_water=mark_parts, first_layer=i)
        assert mark_parts == (6 if i == 2 else 16)
    assert torch.equal(whole, parts)


def test_rows_of_an_abandoned_batch_are_cleared(device):
    layers = make_layers(2, 2, 8, 5, device=device)
    index = torch.arange(16, device=device)
    out = torch.zeros(16, 10, device=device)
    mark, many, few = (torch.tensor(rows, device=device) for rows in (0, 16, 3))
    ops.pack_hidden(layers[:1], index, out, n_rows=many, high_water=mark)
    ops.pack_hidden(layers, index, out, n_rows=few, high_water=mark)
    assert (out[3:] == 0).all()
    assert mark == 3


def test_keeps_nan_and_negative_zero_bits(device):
    layer = torch.tensor([[[float("nan"), -0.0, float("inf")]]], device=device)
    out = torch.zeros(1, 3, device=device)
    index, n, mark = (torch.tensor(x, device=device) for x in ([0], 1, 0))
    ops.pack_hidden([layer], index, out, n_rows=n, high_water=mark)
    assert torch.equal(out.view(torch.int32), layer[0].view(torch.int32))


def bad(**changes):
    good = {
        "layers": make_layers(2, 2, 3, 4),
        "src_index": torch.arange(6),
        "out": torch.zeros(6, 8),
        "n_rows": torch.tensor(6),
        "high_water": torch.tensor(0),
        "first_layer": 0,
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layers: found none"),
        ({"layers": [torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)]}, "layer: found shape"),
        ({"layers": [torch.zeros(6, 4)]}, "found 2 dimensions, want 3"),
        ({"layers": make_layers(2, 2, 3, 4, torch.float64)}, "layer: found Double, want Float"),
        ({"layers": [torch.zeros(2, 4, 3).transpose(1, 2)] * 2}, "contiguous last dimension"),
        ({"src_index": torch.arange(6).int()}, "src_index: found Int"),
        ({"src_index": torch.arange(1, 7)}, "src_index: found 6 at 5, want -1 to 5"),
        ({"src_index": torch.arange(6) - 2}, "src_index: found -2 at 0"),
        ({"out": torch.zeros(5, 8)}, "out: found shape [5, 8], want T = 6"),
        ({"out": torch.zeros(6, 9)}, "want H = 4"),
        ({"n_rows": torch.tensor(7)}, "n_rows: found 7, want 0 to 6"),
        ({"n_rows": torch.tensor([6])}, "n_rows: found shape [1]"),
        ({"high_water": torch.tensor(-1)}, "high_water: found -1"),
        ({"first_layer": 1}, "first_layer: found layers 1 to 3, want at most the 2 of out"),
    ],
)
def test_rejects(changes, message):
    arguments = bad(**changes)
    with pytest.raises(RuntimeError) as error:
        ops.pack_hidden(
            arguments.pop("layers"), arguments.pop("src_index"), arguments.pop("out"), **arguments
        )
    assert message in str(error.value)


@pytest.mark.parametrize("layout", ["concat", "split"])
@pytest.mark.parametrize("n_rows", [0, 5])
def test_opcheck(layout, n_rows, device):
    layers, index = make_layers(2, 2, 3, 4, device=device), torch.arange(6, device=device)
    out = make_slot(2, 6, 4, torch.float32, layout, device)
    torch.library.opcheck(
        torch.ops.dflash_ext.pack_hidden.default,
        (layers, index, out),
        {
            "n_rows": torch.tensor(n_rows, device=device),
            "high_water": torch.tensor(6, device=device),
            "first_layer": 0,
        },
    )
