"""Questions about the functions and classes of Python's standard library, held out by package.

`configs/data/python_library.txt` lists the public names of each module; the wordings are ours. A
package (`xml` of `xml.dom.minidom`) lies in one of the two splits with all of its modules.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

NAMES = Path(__file__).parents[1] / "configs" / "data" / "python_library.txt"
HELD_OUT_SHARE = 0.12  # of the packages
WORDINGS_OF_A_NAME = 2
WORDINGS = (
    "What does `{name}` from Python's module `{module}` do?",
    "Explain `{module}.{name}` to a beginner in a few sentences.",
    "Show a short Python example that uses `{name}` from `{module}`.",
    "When would I use `{name}` from the `{module}` module in Python?",
    "Write a docstring for `{module}.{name}`.",
    "Which arguments does `{module}.{name}` take, and what does it return?",
    "I found `{name}` in the Python module `{module}`. What is it good for?",
    "Write a Python function that calls `{module}.{name}` and handles errors.",
    "Name three common mistakes with `{module}.{name}` in Python.",
    "Write a unit test for code that uses `{name}` from `{module}`.",
    "Compare `{module}.{name}` with another way to do the same in Python.",
    "Summarise the purpose of `{name}` in Python's `{module}` in one paragraph.",
)


def names_by_module() -> dict[str, list[str]]:
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(": ", 1) for line in lines)
    return {module: names.split() for module, names in pairs}


def package_of(module: str) -> str:
    return module.split(".")[0]


def split_of(module: str) -> Split:
    """A package's split depends on its name alone."""
    return "heldout" if _number(package_of(module)) < HELD_OUT_SHARE * 2**32 else "train"


def questions(split: Split) -> list[dict[str, object]]:
    """Rows {"topic": package, "messages": [the question]}, in an order that mixes the packages."""
    rows: list[tuple[int, dict[str, object]]] = []
    for module, names in names_by_module().items():
        if split_of(module) != split:
            continue
        for name in names:
            first = _number(f"{module}.{name}")
            for i in range(WORDINGS_OF_A_NAME):
                wording = WORDINGS[(first + i * 5) % len(WORDINGS)]
                text = wording.format(name=name, module=module)
                message = {"role": "user", "content": text}
                row = {"topic": package_of(module), "messages": [message]}
                rows.append((_number(text), row))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def write_questions(path: Path, split: Split, limit: int | None = None) -> int:
    """Writes JSONL for `regenerate`, the first `limit` rows; returns how many."""
    rows = questions(split)[:limit]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
