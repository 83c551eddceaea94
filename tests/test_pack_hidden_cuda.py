"""pack_hidden on GPUs: what test_pack_hidden.py cannot ask of every device."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from dflash_ext import ops
from dflash_ext.ops.pack_hidden.naive import pack_hidden_naive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

ROOT = Path(__file__).parent.parent
SLEEP_CYCLES = 500_000_000  # a quarter of a second, or more


def scalar(value, device="cuda"):
    return torch.tensor(value, device=device)


def make_case(device="cuda", rows=300, width=5120, layers=3, seed=0):
    """(layers, index, a poisoned slot, n_rows, high_water) with all rows of the slot dirty."""
    g = torch.Generator().manual_seed(seed)
    hidden = [
        torch.randn(4, rows // 2, width, generator=g).bfloat16().to(device) for _ in range(layers)
    ]
    index = torch.randint(-1, 2 * rows, (rows,), generator=g).to(device)
    out = torch.full((rows, layers * width), 7.0, dtype=torch.bfloat16, device=device)
    return hidden, index, out, scalar(rows - 5, device), scalar(rows, device)


def expected_of(hidden, index, out, n_rows, high_water):
    slot = torch.full_like(out, 7.0, device=index.device)
    mark = high_water.to(index.device, copy=True)
    pack_hidden_naive(hidden, index, slot, n_rows=n_rows, high_water=mark)
    return slot


@pytest.mark.parametrize("layout", ["concat", "split"])
def test_slot_beyond_2_31_elements(layout):
    width, num_layers, capacity = 5120, 6, 70_003
    layers = [torch.randn(1, 64, width, device="cuda").bfloat16() for _ in range(num_layers)]
    index = torch.randint(0, 64, (capacity,), device="cuda")
    index[-2] = -1
    shape = (capacity, num_layers * width)
    if layout == "split":
        shape = (num_layers, capacity, width)
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    assert out.numel() > 2**31
    n_rows, mark = scalar(capacity - 1), scalar(capacity)
    ops.pack_hidden(layers, index, out, n_rows=n_rows, high_water=mark)
    index[-1] = -1
    for begin in range(0, capacity, 10_000):
        rows = index[begin : begin + 10_000]
        for i, layer in enumerate(layers):
            got = out[i] if layout == "split" else out[:, i * width : (i + 1) * width]
            wanted = layer[0][rows.clamp_min(0)] * (rows >= 0)[:, None]
            assert torch.equal(got[begin : begin + 10_000], wanted)


def test_layer_beyond_2_31_elements():
    layer = torch.empty(2, 220_000, 5120, dtype=torch.bfloat16, device="cuda")
    assert layer.numel() > 2**31
    tail = torch.randn(50, 5120, device="cuda").bfloat16()
    layer[1, -50:] = tail
    index = torch.arange(440_000 - 50, 440_000, device="cuda")
    out = torch.zeros(50, 5120, dtype=torch.bfloat16, device="cuda")
    ops.pack_hidden([layer], index, out, n_rows=scalar(50), high_water=scalar(0))
    assert torch.equal(out, tail)


def test_graph_replays_follow_the_counts_on_the_device():
    hidden, index, out, n_rows, mark = make_case()

    def pack():
        for i, layer in enumerate(hidden):
            ops.pack_hidden([layer], index, out, n_rows=n_rows, high_water=mark, first_layer=i)

    pack()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack()
    for seed, rows in enumerate((300, 7, 0, 120)):
        other = make_case(seed=10 + seed)
        for layer, new in zip(hidden, other[0], strict=True):
            layer.copy_(new)
        index.copy_(other[1])
        n_rows.fill_(rows)
        graph.replay()
        wanted = torch.zeros_like(out)
        pack_hidden_naive(hidden, index, wanted, n_rows=n_rows, high_water=scalar(0))
        assert torch.equal(out, wanted)
        assert mark == rows


def test_works_on_the_current_stream():
    hidden, index, out, n_rows, mark = make_case()
    new = [torch.randn_like(layer) for layer in hidden]
    wanted = expected_of(new, index, out, n_rows, mark)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        for layer, values in zip(hidden, new, strict=True):
            layer.copy_(values)
        ops.pack_hidden(hidden, index, out, n_rows=n_rows, high_water=mark)
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_host_does_not_wait():
    hidden, index, out, n_rows, mark = make_case()
    ops.pack_hidden(hidden, index, out, n_rows=n_rows, high_water=mark)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.perf_counter()
    for _ in range(20):
        ops.pack_hidden(hidden, index, out, n_rows=n_rows, high_water=mark)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    total = time.perf_counter() - begin
    assert host < total / 4


@two_gpus
@pytest.mark.parametrize("mark_on", ["cuda:0", "cuda:1"])
def test_slot_on_another_gpu(mark_on):
    hidden, index, out, n_rows, mark = make_case("cuda:0")
    wanted = expected_of(hidden, index, out, n_rows, mark)
    out, mark = out.to("cuda:1"), mark.to(mark_on)
    with torch.cuda.device(1):  # neither is the current device the layers' one
        for i, layer in enumerate(hidden):
            ops.pack_hidden([layer], index, out, n_rows=n_rows, high_water=mark, first_layer=i)
    torch.cuda.synchronize(0)
    assert torch.equal(out.cpu(), wanted.cpu())
    assert mark.item() == n_rows.item()


@two_gpus
def test_threads_of_two_gpus_at_once():
    errors = []

    def work(this, other):
        try:
            torch.cuda.set_device(this)
            with torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(30):
                    hidden, index, out, n_rows, mark = make_case(this, seed=seed, width=512)
                    wanted = expected_of(hidden, index, out, n_rows, mark)
                    far, near = torch.empty_like(out, device=other), torch.empty_like(out)
                    torch.cuda.synchronize(other)
                    for slot in (far, near):
                        mark.fill_(len(index))
                        ops.pack_hidden(hidden, index, slot, n_rows=n_rows, high_water=mark)
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(far.cpu(), wanted.cpu())
                    assert torch.equal(near, wanted)
        except BaseException as error:
            errors.append(error)

    devices = ["cuda:0", "cuda:1"]
    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(devices, reversed(devices), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("src_index", "src_index: found a tensor on cpu, want cuda:0 like layers[0]"),
        ("n_rows", "n_rows: found a tensor on cpu, want cuda:0 like layers[0]"),
        ("out", "out: found a tensor on cpu, want cuda"),
        ("high_water", "high_water: found a tensor on cpu, want cuda"),
    ],
)
def test_rejects_tensors_of_the_host(name, message):
    hidden, index, out, n_rows, mark = make_case(width=8)
    arguments = {"src_index": index, "out": out, "n_rows": n_rows, "high_water": mark}
    arguments[name] = arguments[name].cpu()
    with pytest.raises(RuntimeError) as error:
        ops.pack_hidden(hidden, **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("change", ["index[3] = 8", "n.fill_(7)"])
def test_index_out_of_range_stops_the_process(change):
    program = (
        "import torch; from dflash_ext import ops; index = torch.arange(6, device='cuda');"
        "n, mark = torch.tensor(6, device='cuda'), torch.tensor(0, device='cuda');"
        f"{change};"
        "ops.pack_hidden([torch.zeros(2, 4, 3, device='cuda')], index,"
        " torch.zeros(6, 3, device='cuda'), n_rows=n, high_water=mark);"
        "torch.cuda.synchronize(); print('went on')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "went on" not in result.stdout
    assert "pack_hidden.cuh" in result.stderr and "Assertion" in result.stderr
