"""A profile of all threads of a running pipeline: calls that wait, and a picture of the overlap.

python -m benchmarks.trace TRACE.json.gz --out PICTURE.png

draws what was at work when, one lane for each kind of work on each device. A trace is a Chrome
trace (for Perfetto, too), cut down to what the picture needs.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pipeline_phases import DRAFTER, TARGET
from dflash_ext.command import CommandParser, run_command
from dflash_ext.config_values import UserError
from dflash_ext.plot import check_picture, pyplot, save_picture

Event = dict[str, Any]
Spans = list[tuple[float, float]]

# What makes the calling thread wait for a device, or may do so inside the driver.
WAITING = re.compile(r"Synchronize|^cudaMemcpy$|^cuMemcpy\w*_v2$|cudaMalloc|cudaFree|cudaHost")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
# Lanes of a device from top to bottom; the first pattern that fits a name decides.
KINDS = (
    ("pack", re.compile(r"pack_hidden")),
    ("all-reduce", re.compile(r"nccl|all_?reduce|c10d|gloo", re.I)),
    ("optimizer", re.compile(r"adamw|muon", re.I)),
    ("metrics and copies", re.compile(r"metric_|Memcpy DtoH|Memcpy.*Pinned")),
)
FORWARD, BACKWARD, TARGET_LANE = "drafter forward", "drafter backward", "target forward"
LANES = (TARGET_LANE, "pack", FORWARD, BACKWARD, "all-reduce", "optimizer", "metrics and copies")
BACKWARD_OP = "autograd::engine::evaluate_function"  # of a CPU, in the thread that trains
COLOURS = ("#4878a8", "#d98a2b", "#6aa56a", "#2f7d4f", "#a05195", "#c0504d", "#777777")
END = "end of the profile"  # behind it the profiler itself waits for the devices
JOINED = 1 / 4000  # of the picture: gaps below are not drawn


@dataclass
class Profile:
    """Events of a profile and the names of its threads, filled in when it has ended."""

    threads: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def waiting_calls(self) -> dict[str, dict[str, int]]:
        """thread -> call -> how often, of the calls that wait for a device."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        calls = {}
        end = min((e["ts"] for e in self.events if e["name"] == END), default=math.inf)
        events = [event for event in self.events if event["ts"] < end]
        for event in events:
            if event.get("cat") in CALLS:
                calls[event["args"].get("correlation")] = event
                if WAITING.search(event["name"]):
                    found[self.thread(event)][event["name"]] += 1
        for event in events:
            # Copies to and from memory that is not pinned wait, whatever call makes them.
            if event.get("cat") == "gpu_memcpy" and "Pageable" in event["name"]:
                call = calls.get(event["args"].get("correlation"), event)
                found[self.thread(call)][event["name"]] += 1
        return {thread: dict(counts) for thread, counts in sorted(found.items())}

    def thread(self, event: Event) -> str:
        """The thread's name; autograd's own threads have none."""
        return self.threads.get(event["tid"], "autograd or library")

    def save(self, path: Path) -> None:
        """Writes a Chrome trace, gzipped if the name says so."""
        named = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in self.threads.items()
        ]
        text = json.dumps({"traceEvents": named + self.events}, separators=(",", ":"))
        write = gzip.open if path.suffix == ".gz" else open
        with write(path, "wt") as file:
            file.write(text)


@contextmanager
def profiling(path: Path | None) -> Iterator[Profile]:
    """Profiles all threads of this process; writes the cut-down trace to `path`, if given."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    found = Profile()
    everyone = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everyone) as profiler:
        yield found
        with record_function(END):
            pass
    found.threads = thread_names()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        found.events = needed(json.loads(whole.read_text())["traceEvents"])
    if path is not None:
        found.save(path)


def thread_names() -> dict[int, str]:
    """By the ids that a trace may use: the system's, and the lower half of pthread's, signed."""
    names = {}
    for thread in threading.enumerate():
        assert thread.ident is not None and thread.native_id is not None
        low = thread.ident & 0xFFFFFFFF
        for tid in (thread.native_id, low, low - (low >> 31 << 32)):
            names[tid] = thread.name
    return names


def needed(events: Sequence[Event]) -> list[Event]:
    """The events that the picture and the counts use, with no more arguments than those."""
    on_gpu = any(event.get("cat") in ON_DEVICE for event in events)
    kept = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        wanted = category in (*ON_DEVICE, *CALLS) or name in (TARGET, DRAFTER, END)
        if category == "cpu_op" and not on_gpu:
            wanted = kind_of(name) is not None or name.startswith(BACKWARD_OP)
        if wanted and event.get("ph") == "X":
            args = {
                key: value
                for key, value in event.get("args", {}).items()
                if key in ("correlation", "device", "stream")
            }
            kept.append({key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts")})
            kept[-1] |= {"dur": event.get("dur", 0), "args": args}
    return kept


def load(path: Path) -> Profile:
    """What `Profile.save` wrote. Raises UserError for a file that cannot be read as such."""
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    except FileNotFoundError:
        raise
    except (ValueError, LookupError, TypeError, EOFError, OSError) as error:
        raise refusal(path, error) from error
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return Profile(names, [e for e in events if e["ph"] == "X"])


def refusal(path: Path, error: Exception) -> UserError:
    why = f"{type(error).__name__}: {error}"
    return UserError(f"{path}: found no trace ({why}), want one of bench_pipeline")


def kind_of(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), None)


def lanes(profile: Profile) -> dict[tuple[str, str], Spans]:
    """(device, lane) -> (start, end) in seconds from the first event on, in order."""
    calls = {
        e["args"]["correlation"]: profile.thread(e)
        for e in profile.events
        if e["cat"] in CALLS and "correlation" in e["args"]
    }
    found: defaultdict[tuple[str, str], Spans] = defaultdict(list)
    on_gpu = any(event["cat"] in ON_DEVICE for event in profile.events)
    for event in profile.events:
        place = None
        if event["cat"] in ON_DEVICE:
            place = _gpu_lane(event, calls)
        elif not on_gpu:
            place = _cpu_lane(profile, event)
        if place is not None:
            start = event["ts"] / 1e6
            found[place].append((start, start + event["dur"] / 1e6))
    if not found:
        return {}
    zero = min(start for spans in found.values() for start, _ in spans)
    moved = {
        place: sorted((start - zero, end - zero) for start, end in spans)
        for place, spans in found.items()
    }

    def order(place: tuple[str, str]) -> tuple[bool, str, int]:
        device, lane = place
        return device.startswith("drafter"), device, LANES.index(lane)

    return {place: moved[place] for place in sorted(moved, key=order)}


def _gpu_lane(event: Event, calls: dict[int, str]) -> tuple[str, str] | None:
    thread = calls.get(event["args"].get("correlation", -1))
    if thread is None:  # launched before the profile began
        return None
    lane = kind_of(event["name"])
    if lane is None and thread.startswith("target"):
        lane = TARGET_LANE
    elif lane is None:
        lane = FORWARD if thread.startswith("drafter") else BACKWARD
    return f"GPU {event['args'].get('device', 0)}", lane


def _cpu_lane(profile: Profile, event: Event) -> tuple[str, str] | None:
    thread, name = profile.thread(event), event["name"]
    if not thread.startswith(("target", "drafter")):
        return None
    if name in (TARGET, DRAFTER):
        return thread, TARGET_LANE if name == TARGET else FORWARD
    lane = BACKWARD if name.startswith(BACKWARD_OP) else kind_of(name)
    return None if lane is None else (thread, lane)


def joined(spans: Spans, gap: float) -> Spans:
    """Sorted spans with those that lie closer than `gap` made one."""
    result: Spans = []
    for start, end in spans:
        if result and start - result[-1][1] <= gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def draw(profile: Profile, out: Path, title: str = "") -> None:
    """Writes the picture; raises ValueError for a trace without any work in it."""
    found = lanes(profile)
    if not found:
        raise ValueError("the trace holds no work of targets or drafters")
    span = max(end for spans in found.values() for _, end in spans)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(11, 0.6 + 0.32 * len(found)), dpi=110)
    for row, ((_, lane), spans) in enumerate(found.items()):
        bars = [(start, end - start) for start, end in joined(spans, span * JOINED)]
        # Its edge keeps the shortest bar visible.
        axes.broken_barh(bars, (row + 0.1, 0.8), color=COLOURS[LANES.index(lane)], linewidth=0.6)
    axes.set_yticks([row + 0.5 for row in range(len(found))])
    axes.set_yticklabels([f"{device}  {lane}" for device, lane in found], fontsize=8)
    axes.set_ylim(len(found), 0)
    axes.set_xlim(0, span)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_picture(figure, out)


def main() -> int:
    parser = CommandParser(prog="python -m benchmarks.trace", description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    trace, out = arguments.trace, arguments.out
    check_picture("--out", out)
    if out.exists() and trace.exists() and out.samefile(trace):
        raise UserError(f"--out: found {out}, the trace itself, want another file")
    try:
        profile = load(trace)
        draw(profile, out, arguments.title)
        calls = profile.waiting_calls()
    except (LookupError, TypeError, AttributeError) as error:  # events of another shape
        raise refusal(trace, error) from error
    except ValueError as error:
        raise UserError(f"{trace} or --out {out}: {error}") from error
    print(json.dumps(calls, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
