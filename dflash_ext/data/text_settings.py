"""How training text was made, kept beside it: FILE.settings.yaml.

`regenerate` writes it; a run compares it with its own template and switches, because text of
another template or thinking mode is the commonest reason for a drafter that trains well and serves
badly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dflash_ext.config import UserError
from dflash_ext.config_values import read_yaml, shown
from dflash_ext.files import replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Settings = Mapping[str, object]

# Of `regenerate`; all of them have to stay as they are when an unfinished file is continued.
FIELDS = (
    *("target", "model", "revision", "dtype", "template", "enable_thinking"),
    *("temperature", "max_new_tokens", "keep_truncated"),
)


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The first 16 digits of the SHA-256 of the chat template's text."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_path(text: str | Path) -> Path:
    return Path(f"{text}.settings.yaml")


def read_settings(text: str | Path) -> dict[str, object] | None:
    """The settings beside a file of text, None if there are none. Raises UserError."""
    path = settings_path(text)
    if not path.is_file():
        return None
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not settings.keys() <= {*FIELDS}:
        raise UserError(f"{path}: found {shown(settings)}, want what regenerate wrote there")
    return settings


def write_settings(text: str | Path, settings: Settings) -> None:
    replace_file(settings_path(text), yaml.safe_dump(dict(settings), sort_keys=False))


def check_same(text: str | Path, now: Settings, unknown: Collection[str] = ()) -> None:
    """Refuse to go on with a file that was begun with other settings.

    `unknown`: settings that are not compared. Raises UserError naming all that differ.
    """
    before = read_settings(text) or {}
    differing = [
        f"found {name} {shown(value)}, this command has {shown(now.get(name))}"
        for name, value in before.items()
        if name not in unknown and now.get(name) != value
    ]
    if differing:
        raise UserError(
            f"{settings_path(text)}: {'; '.join(differing)}; want the same or a new --out"
        )


def mismatches(
    text: str, settings: Settings, template: str | None, enable_thinking: bool | None
) -> list[str]:
    """What of a training file's settings contradicts the run's, in words."""
    found = []
    made_with = settings.get("template")
    if made_with is not None and made_with != template:
        found.append(
            f"{text} was made with the chat template {made_with}, the tokenizer has {template}"
        )
    thinking = settings.get("enable_thinking")
    if thinking != enable_thinking:
        found.append(
            f"{text} was made with enable_thinking {shown(thinking)}, this run has "
            f"data.enable_thinking {shown(enable_thinking)}"
        )
    return found
