"""Exported drafters: the Hugging Face layout that z-lab's code, SGLang and vLLM load.

    python -m dflash_ext.export --run runs/X [--step N] --out DIR [--check]

A folder with config.json and model.safetensors; tensor names carry no prefix, and embedding and
head are the target's, so they are not stored.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_ext.config import CommandParser, UserError, run_command
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.drafter.spec import DrafterSpec

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_export(
    model: DFlashDraftModel, folder: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write `model` to `folder` in `dtype` (default: its own); the folder appears complete or not.

    An older export there is replaced. Raises UserError if the folder holds anything else, and
    RuntimeError if a tensor has a non-finite value.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder)
    stored = dtype or next(model.parameters()).dtype
    tensors = {
        name: tensor.detach().to("cpu", stored).contiguous()
        for name, tensor in model.state_dict().items()
    }
    check_finite(tensors, str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / WEIGHTS).chmod(0o644)  # servers often run as another user
        config = model.spec.to_hf_config(str(stored).removeprefix("torch."))
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            _sync(fresh / name)
        _sync(fresh)
        _swap_in(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read_export(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """The spec and the tensors of an exported drafter. Raises UserError if it cannot be read."""
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder}: found no readable drafter ({error}), want an export folder"
        ) from error
    return DrafterSpec.from_hf_config(config), tensors


def check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], place: str) -> None:
    """Raise UserError naming a tensor that is missing, unknown, or of another shape."""
    want = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    for name in sorted(want.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        if found != want.get(name):
            raise UserError(f"{place}: {name}: found {found}, want {want.get(name, 'nothing')}")


def check_finite(tensors: Mapping[str, Tensor], place: str) -> None:
    """Raise RuntimeError naming a tensor with a non-finite value."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RuntimeError(f"{place}: {name} has non-finite values")


@torch.no_grad()
def check_export(folder: str | Path, model: DFlashDraftModel) -> list[str]:
    """Reload an export and compare it with the model it was written from.

    Names, shapes, dtypes, finiteness, config, and the outputs on random input: equal bits if the
    stored dtype is the model's, else equal to those of the model rounded to it. Returns the lines
    of a report; raises RuntimeError for the first difference.
    """
    spec, tensors = read_export(folder)
    check_tensors(model, tensors, str(folder))
    check_finite(tensors, str(folder))
    if spec != model.spec:
        raise RuntimeError(f"{folder}: config.json: found {spec}, want {model.spec}")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise RuntimeError(f"{folder}: found tensors of several dtypes {dtypes}, want one")
    loaded = DFlashDraftModel.from_pretrained(folder)
    states = {name: tensor.to("cpu", *dtypes) for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        rounded = DFlashDraftModel(model.spec)
    rounded.load_state_dict(states, assign=True)
    if not torch.equal(_probe(loaded), _probe(rounded)):
        raise RuntimeError(f"{folder}: found other outputs than those of the model")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return [
        f"{len(tensors)} tensors, {numbers:,} numbers, {str(*dtypes).removeprefix('torch.')}: "
        "names, shapes, finiteness",
        "config.json: reads back as the drafter that was trained",
        "outputs on random input: equal to the model's",
    ]


def _probe(model: DFlashDraftModel, context: int = 20) -> Tensor:
    """Outputs of two blocks over a random context."""
    spec, generator = model.spec, torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden = noise(context, len(spec.target_layer_ids) * spec.hidden_size)
    ctx_kv = model.context(hidden, torch.arange(context))
    ends = torch.tensor([context // 2, context])
    return model(noise(2, spec.block_size, spec.hidden_size), ctx_kv, torch.zeros_like(ends), ends)


def check_replaceable(folder: Path) -> None:
    """Raises UserError if `folder` holds anything but an export."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if not names <= {CONFIG, WEIGHTS}:
        unknown = sorted(names - {CONFIG, WEIGHTS})[0]
        raise UserError(f"{folder}: found {unknown!r}, want a new folder or an older export")
    if names:
        try:
            read_export(folder)
        except UserError as error:
            raise UserError(f"{folder}: want a new folder or an older export; {error}") from error


def _swap_in(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`; a reader never sees a mix of old and new files."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_run(run: Path, step: int | None) -> tuple[DFlashDraftModel, int]:
    """The drafter of a run's checkpoint (default: the newest) and its step. Raises UserError."""
    from dflash_ext.checkpoint import CheckpointManager
    from dflash_ext.config import CheckpointConfig

    folder = run / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"--run: found no {folder}, want the folder of a run")
    tensors, meta = CheckpointManager(folder, CheckpointConfig()).load(step)
    states = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    with torch.device("meta"):
        model = DFlashDraftModel(DrafterSpec.from_hf_config(meta["drafter"]))
    check_tensors(model, states, str(folder))
    model.load_state_dict(states, assign=True)
    return model, meta["step"]


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m dflash_ext.export", description="Write a run's drafter for serving."
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a run: runs/NAME")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="stored dtype (default: as trained)")
    parser.add_argument("--check", action="store_true", help="reload and compare with the model")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Export the drafter of a checkpoint."""
    args = _arguments(sys.argv[1:] if argv is None else argv)
    model, step = load_run(args.run, args.step)
    write_export(model, args.out, DTYPES.get(args.dtype))
    print(f"wrote {args.out}: the drafter of {args.run} at step {step}")
    if args.check:
        for line in check_export(args.out, model):
            print(f"ok: {line}")


if __name__ == "__main__":
    sys.exit(run_command(main))
