"""Shared fixtures: seeds, a tiny target with tokenizer, JSONL files."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_switches
import numpy as np
import pytest
import torch
from tiny_run import TinyRun

# Tensors here are tiny: more threads would only wait for each other.
torch.set_num_threads(1)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-off", help="turn off a mechanism of fault_switches.py")


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--fault-off"):
        os.environ[fault_switches.VARIABLE] = name


@pytest.fixture
def cuda_by_default() -> Iterator[None]:
    """Tensors are made on the GPU where nothing else is said."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def fault_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Not monkeypatch: a test may undo that."""
    with pytest.MonkeyPatch.context() as patch:
        if name := request.config.getoption("--fault-off"):
            fault_switches.turn_off(name, patch)
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def nan_poison() -> Iterator[None]:
    """Fresh memory (torch.empty, also in C++) is NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped heads and untied head, and its byte-level ChatML tokenizer.

    Hidden 64, 6 layers, 4/2 heads of 16, MLP 128, 264 embedding rows: 256 bytes, 5 special
    tokens (`SPECIAL_TOKENS`, from id 256 on) and 3 rows of padding.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_target")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(1234)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # weights of 1 would hide a norm that is left out
                parameter.uniform_(0.5, 1.5)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer():
    """One token a byte (ids 0-255 in the order of the byte-level alphabet), then SPECIAL_TOKENS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<|mask|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def tiny_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes `rows` as JSONL; without rows, `n` short chats whose answers repeat a pattern.

    tiny_jsonl(rows=None, *, n=8, name="train.jsonl") -> path of the file.
    """

    def write(rows: list[dict] | None = None, *, n: int = 8, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        lines = [json.dumps(row) for row in (tiny_chats(n) if rows is None else rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def tiny_chats(n: int) -> list[dict]:
    """`n` chats of different lengths in the "messages" format."""
    chats = []
    for i in range(n):
        answer = " ".join(f"{word} {(i + word) % 7}" for word in range(5 + i % 6))
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": f"Count from {i}."},
                    {"role": "assistant", "content": f"Answer: {answer}."},
                ]
            }
        )
    return chats


@pytest.fixture
def run(tiny_target_dir: Path, tiny_jsonl: Callable[..., Path], tmp_path: Path) -> TinyRun:
    """Whole runs on the tiny target; a run gives the signals' handlers back itself."""
    return TinyRun(tiny_target_dir, tiny_jsonl, tmp_path)
