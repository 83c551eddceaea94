"""Exported drafters: the Hugging Face layout that z-lab's code, SGLang and vLLM load.

    python -m dflash_ext.export --run runs/X [--step N|best] --out DIR [--check]

A folder with config.json and model.safetensors; tensor names carry no prefix, and embedding and
head are the target's, so they are not stored.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_ext.checkpoint import CheckpointManager
from dflash_ext.command import CommandParser, run_command
from dflash_ext.config import CheckpointConfig, UserError, from_dict
from dflash_ext.config_values import shown
from dflash_ext.drafter.model import DFlashDraftModel
from dflash_ext.drafter.spec import DrafterSpec
from dflash_ext.dtypes import DTYPES
from dflash_ext.files import naming, sync
from dflash_ext.nonfinite import NonfiniteWeights
from dflash_ext.run_folder import CHECKPOINTS, EXPORT

CONFIG, WEIGHTS = "config.json", "model.safetensors"
STORED_DTYPES = {"float32", "bfloat16", "float16"}
CHECKED_TEXTS = 3
Step = int | Literal["best"]


def write_export(
    model: DFlashDraftModel, folder: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write `model` to `folder` in `dtype` (default: its own); the folder appears complete or not.

    An older export there is replaced. Raises UserError if the folder holds anything else,
    NonfiniteWeights if a tensor has a non-finite value, and OSError, which names the folder.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder)
    stored = dtype or next(model.parameters()).dtype
    tensors = {
        name: tensor.detach().to("cpu", stored).contiguous()
        for name, tensor in model.state_dict().items()
    }
    check_finite(tensors, str(folder))
    config = model.spec.to_hf_config(str(stored).removeprefix("torch."))
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    with naming(folder):
        fresh.mkdir()
        try:
            save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
            (fresh / WEIGHTS).chmod(0o644)  # servers often run as another user
            (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                sync(fresh / name)
            sync(fresh)
            _swap_in(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of an exported drafter, as it is. Raises UserError if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: found no such folder, want an exported drafter")
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        inside = folder / EXPORT  # the folder of a run is easily taken for it
        want = f"the drafter in {inside}" if inside.is_dir() else "an exported drafter"
        raise UserError(f"{path}: found {error.strerror}, want {want}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: found no JSON ({error}), want an exported drafter") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: found {shown(config)}, want a JSON object")
    return config


def read_spec(folder: str | Path) -> DrafterSpec:
    """The spec of an exported drafter. Raises UserError naming what is missing or wrong."""
    return DrafterSpec.from_hf_config(read_config(folder), str(Path(folder) / CONFIG))


def read_export(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """The spec and the tensors of an exported drafter, all finite and of one floating dtype.

    Raises UserError if it cannot be read. Names and shapes are for `check_tensors`.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        others = sorted(p.name for p in folder.iterdir() if p.name.startswith(("model", "pytorch")))
        raise UserError(f"{path}: found {', '.join(others) or 'no such file'}, want the weights")
    try:
        tensors = load_file(path)
    except OSError as error:
        raise UserError(f"{path}: found {error.strerror or error}, want the weights") from None
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path}: found damaged contents ({error}), want the weights") from None
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= STORED_DTYPES:
        found = f"tensors of {' and '.join(sorted(dtypes))}" if dtypes else "no tensors"
        raise UserError(f"{path}: found {found}, want one of {', '.join(sorted(STORED_DTYPES))}")
    try:
        check_finite(tensors, str(path))
    except RuntimeError as error:
        raise UserError(f"{error}, want finite weights") from None
    return spec, tensors


def check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], place: str) -> None:
    """Raise UserError naming a tensor that is missing, unknown, or of another shape."""
    want = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    names = sorted(want.keys() | found.keys())
    wrong = [name for name in names if found.get(name) != want.get(name)]
    if wrong:
        first, more = wrong[0], len(wrong) - 1
        raise UserError(
            f"{place}: {first}: found {found.get(first, 'nothing')}, "
            f"want {want.get(first, 'nothing')}" + (f" (and {more} others)" if more else "")
        )


def check_finite(tensors: Mapping[str, Tensor], place: str) -> None:
    """Raise NonfiniteWeights naming a tensor with a non-finite value."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise NonfiniteWeights(f"{place}: {name} has non-finite values, want finite weights")


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
            read_spec(folder)
        except UserError as error:
            raise UserError(f"{folder}: want a new folder or an older export; {error}") from error


def _swap_in(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`; a reader never sees a mix of old and new files."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_run(
    run: Path, step: int | Literal["best"] | None
) -> tuple[DFlashDraftModel, dict[str, Any]]:
    """The drafter of a run's checkpoint and its meta data.

    `step`: None = the newest, "best" = the one with the highest acceptance length. Raises
    UserError.
    """
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        raise UserError(f"--run: found no {folder}, want the folder of a run")
    checkpoints = CheckpointManager(folder, CheckpointConfig())
    if step == "best":
        step = checkpoints.best()
        if step is None:
            raise UserError("--step: found no checkpoint with an acceptance length, want a number")
    tensors, meta = checkpoints.load(step)
    states = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    with torch.device("meta"):
        model = DFlashDraftModel(DrafterSpec.from_hf_config(meta.get("drafter"), str(folder)))
    check_tensors(model, states, str(folder))
    model.load_state_dict(states, assign=True)
    return model, meta


def check_run(folder: Path, model: DFlashDraftModel, meta: dict[str, Any]) -> Iterator[str]:
    """The lines of the whole check of an export: the files, then logits on the run's own text.

    Raises UserError or ExportError, in the order of the lines.
    """
    from dflash_ext.data.conversations import load_examples
    from dflash_ext.export_check import check_export
    from dflash_ext.target import load_target, load_tokenizer
    from dflash_ext.zlab import compare_logits

    yield from check_export(folder, model)
    cfg = from_dict(meta.get("config"), "the checkpoint's configuration")
    tokenizer = load_tokenizer(cfg.model.target, cfg.model.revision)
    target = load_target(
        cfg.model.target, dtype=cfg.model.dtype, device="cpu", revision=cfg.model.revision
    )
    examples, _ = load_examples(
        (cfg.data.eval or cfg.data.train)[:1],
        tokenizer,
        cfg.data,
        mask_token_id=model.spec.mask_token_id,
        vocab_size=target.info.vocab_size,
    )
    yield compare_logits(folder, target, examples[:CHECKED_TEXTS])


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m dflash_ext.export", description="Write a run's drafter for serving."
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a run: runs/NAME")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="step of the checkpoint, or best: the highest acceptance length (default: the newest)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="stored dtype (default: as trained)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="reload it, read it as the engines do, compare logits with z-lab's package",
    )
    return parser.parse_args(argv)


def _step(text: str) -> Step:
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, want a whole number or best")
    return "best" if text == "best" else int(text)


def main(argv: list[str] | None = None) -> None:
    """Export the drafter of a checkpoint."""
    args = _arguments(sys.argv[1:] if argv is None else argv)
    check_replaceable(args.out.resolve())
    model, meta = load_run(args.run, args.step)
    write_export(model, args.out, DTYPES.get(args.dtype))
    print(f"wrote {args.out}: the drafter of {args.run} at step {meta['step']}")
    if args.check:
        for line in check_run(args.out, model, meta):
            print(line if line.startswith("note") else f"ok: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
