"""Times every operator beside what one would call otherwise, after checking its result.

python -m benchmarks.run [--only NAME] [--device cpu|cuda:0] [--peers DIR] [--json OUT]
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import dflash_ext
from benchmarks import median_seconds
from dflash_ext.command import CommandParser, check_output_file, device_of, run_command


def names() -> list[str]:
    return sorted(path.stem[len("bench_") :] for path in Path(__file__).parent.glob("bench_*.py"))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def output_of(*command: str) -> str | None:
    """What a program prints, if it is there and succeeds."""
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def facts(device: torch.device) -> dict[str, str | None]:
    """What a result depends on: the machine, the versions, the commit, the day."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    found = {
        "torch": torch.__version__,
        "triton": triton,
        "dflash_ext": dflash_ext.__version__,
        "commit": output_of("git", "rev-parse", "--short=12", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cpu":
        return {"machine": f"{processor()}, {torch.get_num_threads()} threads", **found}
    query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    driver = (output_of(*query) or "").splitlines()
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    return {"machine": gpus, "driver": driver[0] if driver else None, **found}


def timed(module: ModuleType, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each case of a module, checked and then timed beside its peer."""
    for case in module.cases(device):
        case.check()
        mine, peer = median_seconds((case.run, case.peer), device, sustained=case.sustained)
        yield {
            "op": case.op,
            "shape": case.shape,
            "us": mine * 1e6,
            "peer": case.peer_name,
            "peer_us": peer * 1e6,
            "speedup": peer / mine,
            "bytes_moved": case.bytes_moved,
            "flops": case.flops,
            "ceiling": case.ceiling,
            "share_of_ceiling": case.share(mine),
            "rate": case.rate(mine),
        }


def line(row: dict[str, Any]) -> str:
    """A row of results as printed; one without a time says why in "error" or "note"."""
    start = f"{row['op']:15} {row['shape']:38} "
    if "peer_us" not in row:
        return start + f"{row['peer']}: {row.get('error') or row['note']}"
    share, speedup = row.get("share_of_ceiling"), row["speedup"]
    return start + (
        f"{'-' if row['us'] is None else format(row['us'], '.1f'):>10} "
        f"{row.get('rate') or '-':>13} {f'{share:.1%}' if share else '-':>8} "
        f"{f'{speedup:.2f}x' if speedup else '-':>8}  {row['peer']} ({row['peer_us']:.1f})"
    )


def conditions_line(conditions: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in conditions.items() if value)


def write_report(out: Path, conditions: dict[str, Any], results: list[dict[str, Any]]) -> None:
    found = {"conditions": conditions, "results": results}
    out.write_text(json.dumps(found, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=names(), help="run this one alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--peers", metavar="DIR", help="folder of unpacked wheels of the trainers in bench_step"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    arguments = parser.parse_args(argv)
    device = device_of("--device", arguments.device)
    if arguments.json:
        check_output_file("--json", arguments.json)
    if arguments.peers:
        sys.path.insert(0, arguments.peers)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    conditions = facts(device)
    print("# " + conditions_line(conditions))
    print(
        f"{'op':15} {'shape':38} {'us':>10} {'rate':>13} {'of peak':>8} {'vs peer':>8}  peer (us)"
    )
    results = []
    for name in [arguments.only] if arguments.only else names():
        module = importlib.import_module(f"benchmarks.bench_{name}")
        # A module that times more than two sides at once makes its own rows.
        rows = module.measure(device) if hasattr(module, "measure") else timed(module, device)
        for row in rows:
            print(line(row), flush=True)
            results.append(row)
            if arguments.json:
                write_report(arguments.json, conditions, results)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
