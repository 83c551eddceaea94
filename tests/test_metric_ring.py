import functools
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from dflash_ext import _C

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CXX", "g++")
MILLION = 1_000_000


def records(ring):
    """Every record that can be popped now."""
    return list(iter(ring.pop, None))


def test_pops_in_order_and_empties():
    ring = _C.MetricRing(4, 3)
    assert ring.pop() is None
    for i in range(3):
        ring.push(torch.tensor([i, -i, 2**62 + i]))
    assert records(ring) == [[i, -i, 2**62 + i] for i in range(3)]
    assert ring.pop() is None
    assert ring.dropped == 0


@pytest.mark.parametrize("pushes", [4, 5, 8, 9, 1000])
@pytest.mark.parametrize("slots", [2, 4, 7])
def test_overrun_keeps_the_newest_and_counts_the_rest(slots, pushes):
    ring = _C.MetricRing(slots, 1)
    for i in range(pushes):
        ring.push(torch.tensor([i]))
    kept = min(slots, pushes)
    assert records(ring) == [[i] for i in range(pushes - kept, pushes)]
    assert ring.dropped == pushes - kept
    ring.push(torch.tensor([-1]))
    assert records(ring) == [[-1]]
    assert ring.dropped == pushes - kept


@pytest.mark.parametrize(
    "record",
    [
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(3),
        torch.zeros(6, dtype=torch.int64)[::2],
        torch.zeros(3, dtype=torch.int64, device="meta"),
    ],
)
def test_rejects_other_records(record):
    with pytest.raises(RuntimeError, match=r"record: found .*, want contiguous int64\[3\] on cpu"):
        _C.MetricRing(2, 3).push(record)


@pytest.mark.parametrize(("slots", "words"), [(1, 3), (2, 0), (-1, 1)])
def test_rejects_other_sizes(slots, words):
    with pytest.raises(ValueError, match="want slots >= 2 and words >= 1, found"):
        _C.MetricRing(slots, words)


def test_python_threads():
    ring = _C.MetricRing(8, 83)
    pushes = 2000

    def publish():
        record = torch.zeros(83, dtype=torch.int64)
        for i in range(pushes):
            record.fill_(i)
            ring.push(record)

    thread = threading.Thread(target=publish)
    thread.start()
    seen = []
    while not seen or seen[-1] != pushes - 1:
        record = ring.pop()
        if record is not None:
            assert len(set(record)) == 1
            seen.append(record[0])
    thread.join()
    assert seen == sorted(set(seen))
    assert len(seen) + ring.dropped == pushes


@functools.cache
def runner() -> list[str]:
    """A prefix that fixes the address layout: some sanitizers do not run under a random one."""
    prefix = ["setarch", "-R"]
    works = shutil.which("setarch") and not subprocess.run([*prefix, "true"]).returncode
    return prefix if works else []


def compile_and_run(folder, source, flags, arguments=()):
    program = folder / "program"
    command = [COMPILER, "-std=c++17", "-O2", "-g", "-pthread", *flags, f"-I{ROOT / 'csrc'}"]
    built = subprocess.run(
        [*command, *map(str, source), "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode:
        return built
    return subprocess.run(
        [*runner(), str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )


def race(folder, flags, *arguments):
    sources = [ROOT / "tests" / "ring" / "race.cpp", ROOT / "csrc" / "metric_ring.cpp"]
    return compile_and_run(folder, sources, flags, arguments)


def need_sanitizer(folder, flags):
    """Skips if the compiler has no runtime of this sanitizer: an empty program does not run."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    if compile_and_run(folder, [source], flags).returncode:
        pytest.skip(f"{COMPILER} {' '.join(flags)} does not run here")


def counts(result):
    assert result.returncode == 0, result.stdout + result.stderr
    _, read, _, dropped = result.stdout.split()
    return int(read), int(dropped)


@pytest.mark.parametrize(("slots", "words"), [(2, 83), (4, 9), (64, 83)])
def test_race(tmp_path, slots, words):
    read, dropped = counts(race(tmp_path, [], MILLION, slots, words))
    assert read + dropped == MILLION
    # Both sides met; how often the reader falls behind is the scheduler's choice.
    assert read > 100
    assert dropped > 100


def test_race_with_room_for_all(tmp_path):
    assert counts(race(tmp_path, [], 50_000, 50_000, 5)) == (50_000, 0)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_race_under_a_sanitizer(tmp_path, sanitizer):
    flags = [f"-fsanitize={sanitizer}"]
    need_sanitizer(tmp_path, flags)
    read, dropped = counts(race(tmp_path, flags, MILLION, 4, 9))
    assert read + dropped == MILLION
    assert read > 10_000


def test_the_race_is_seen_without_the_ordering(tmp_path):
    flags = ["-fsanitize=thread"]
    need_sanitizer(tmp_path, flags)
    result = race(tmp_path, [*flags, "-DDFLASH_RING_UNORDERED"], MILLION, 4, 9)
    assert result.returncode != 0
    assert "data race" in result.stderr
