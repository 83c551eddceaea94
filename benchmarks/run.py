"""Times every operator beside what one would call otherwise, after checking its result.

python -m benchmarks.run [--only NAME] [--device cpu|cuda:0] [--json OUT]
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path

import torch

import dflash_ext
from benchmarks import time_both


def names() -> list[str]:
    return sorted(path.stem[len("bench_") :] for path in Path(__file__).parent.glob("bench_*.py"))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def machine_line(device: torch.device) -> str:
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{where}, torch {torch.__version__}, dflash_ext {dflash_ext.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=names(), help="run this one alone")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    arguments = parser.parse_args()
    device: torch.device = arguments.device

    machine = machine_line(device)
    print(f"# {machine}")
    print(f"{'op':15} {'shape':38} {'us':>10} {'rate':>13} {'vs peer':>8}  peer (us)")
    results = []
    for name in [arguments.only] if arguments.only else names():
        for case in importlib.import_module(f"benchmarks.bench_{name}").cases(device):
            case.check()
            mine, peer = time_both(case, device)
            print(
                f"{case.op:15} {case.shape:38} {mine * 1e6:10.1f} {case.rate(mine):>13} "
                f"{peer / mine:7.2f}x  {case.peer_name} ({peer * 1e6:.1f})",
                flush=True,
            )
            results.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "us": mine * 1e6,
                    "peer": case.peer_name,
                    "peer_us": peer * 1e6,
                    "speedup": peer / mine,
                    "bytes_moved": case.bytes_moved,
                    "flops": case.flops,
                }
            )
    if arguments.json:
        report = {"machine": machine, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
