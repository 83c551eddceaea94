"""The train command's line, on top of the configuration's dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from dflash_ext.config import (
    SECTIONS,
    TYPES,
    Config,
    Flags,
    convert,
    from_dict,
    load_config,
    to_yaml,
    unknown_field,
    validate,
)
from dflash_ext.config_values import (
    HUB_PREFIX,
    UserError,
    read_yaml,
    shown,
    split_weight,
    type_name,
)

PROJECT_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = "configs/smollm2_cpu.yaml"


def parse(argv: Sequence[str]) -> tuple[Config, Flags]:
    """See ``config.parse_config``."""
    if "-h" in argv or "--help" in argv:
        _parser().parse_args(["--help"])
    files, rest = _split_config_files(argv)
    paths = [_find(name) for name in files or [DEFAULT_CONFIG]]
    for path in paths:
        load_config(path)  # refuses unknown names and wrong types, naming the file
    rest = _joined(rest)
    # jsonargparse does not take an empty file.
    config_args = [f"--config={path}" for path in paths if read_yaml(path)]
    try:
        parsed = _parser().parse_args([*config_args, *rest])
    except jsonargparse.ArgumentError as error:
        raise UserError(f"command line: {error}") from None
    # A section that is there but empty in the YAML arrives as None.
    sections = {name: getattr(parsed, name) for name in SECTIONS}
    cfg = from_dict({name: vars(s) for name, s in sections.items() if s}, "command line")
    cfg.data.train = [_find_text(entry) for entry in cfg.data.train]
    cfg.data.eval = [_find_text(entry) for entry in cfg.data.eval]
    validate(cfg, devices=not parsed.plan)
    if parsed.print_config:
        print(to_yaml(cfg), end="")
        raise SystemExit(0)
    return cfg, Flags(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(Flags)})


def _find(name: str) -> Path:
    """A file relative to the working directory, else to the project or its configs folder."""
    candidates = [Path(name), PROJECT_ROOT / name, PROJECT_ROOT / "configs" / name]
    return next((path for path in candidates if _exists(path)), candidates[0])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        return False


def _find_text(entry: str) -> str:
    """An entry of data.train or data.eval with its file found."""
    name = split_weight(entry)[1]
    # An empty name is for `validate` to refuse: as a path it is the working folder.
    found = name if not name.strip() or name.startswith(HUB_PREFIX) else str(_find(name))
    return f"{entry.partition('*')[0].strip()} * {found}" if name != entry else found


def _split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(values of --config, everything else): later arguments win, so files must come first."""
    files, rest, args = [], [], iter(argv)
    for arg in args:
        if arg == "--config":
            files.append(next(args, ""))
        elif arg.startswith("--config="):
            files.append(arg.removeprefix("--config="))
        else:
            rest.append(arg)
    if "" in files:
        raise UserError("--config: found no value, want a YAML file")
    return files, rest


def _joined(args: Sequence[str]) -> list[str]:
    """The same flags, each with its value in one word, which may then start with a dash.

    Refuses unknown flags, stray words, missing and needless values, one line each.
    """
    switches = ("print_config", *(f.name for f in dataclasses.fields(Flags)))
    joined, words = [], iter(args)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise UserError(f"command line: found {shown(word)}, want --section.field value")
        if name in TYPES:
            if not equals and (value := next(words, "--")).startswith("--"):
                raise UserError(f"{name}: found no value, want {type_name(TYPES[name])}")
            joined.append(f"--{name}={value}")
        elif name not in switches:
            raise unknown_field(name, "command line", switches)
        elif equals:
            raise UserError(f"command line: found {shown(word)}, want --{name} without a value")
        else:
            joined.append(word)
    return joined


class _FieldType:
    """Converter of one field's values; its repr is the type that ``--help`` shows."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, value: object) -> object:
        return convert(self.key, value)

    def __repr__(self) -> str:
        return type_name(TYPES[self.key])


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="python -m dflash_ext.train",
        usage="%(prog)s [--config FILE] [--section.field value ...] [--resume] [--plan] ...",
        description="Train a DFlash drafter for a frozen target model.",
        exit_on_error=False,
        print_config=None,
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help=f"YAML file (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the whole configuration, then stop"
    )
    for switch in dataclasses.fields(Flags):
        parser.add_argument(f"--{switch.name}", action="store_true", help=switch.metadata["doc"])
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(name, section.__doc__)
        for item in dataclasses.fields(section):
            key = f"{name}.{item.name}"
            group.add_argument(
                f"--{key}",
                type=_FieldType(key),
                default=getattr(section(), item.name),
                metavar="V",
                help=item.metadata["doc"],
            )
    return parser
