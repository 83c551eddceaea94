"""The Triton kernels of block_attention without a GPU: interpreted in fp32, and compiled."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from triton_compile import needs_interpreter

pytest.importorskip("triton")

KIB = 1024
# Shared memory that a block may have, by compute capability.
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
SHAPES = [  # capability, dtype, head size, slots, group: by that, with or without prepare_kernel
    (80, torch.bfloat16, 128, 16, 4),
    (89, torch.bfloat16, 128, 16, 4),
    (90, torch.bfloat16, 128, 16, 4),
    (90, torch.bfloat16, 128, 16, 2),
    (90, torch.bfloat16, 64, 16, 4),
    (90, torch.bfloat16, 64, 16, 3),
    (100, torch.bfloat16, 128, 16, 4),
    (80, torch.bfloat16, 256, 8, 1),
    (80, torch.float32, 128, 16, 4),
    (80, torch.float32, 256, 16, 4),
]

INTERPRETED = """
import dataclasses
import torch
from triton_compile import needs_interpreter
from block_attention_cases import MASKS, error, make_case
from dflash_ext.ops.block_attention import triton as kernels
from dflash_ext.ops.block_attention.naive import block_attention_naive

torch.set_num_threads(1)
torch.manual_seed(0)

both = [{}, {"window": 3, "causal": True}]
cases = [((5, 5, (6, 2), 24, 60), mask) for mask in MASKS]
for shape in (
    (3, 8, (9, 3), 64, 50),
    (2, 17, (3, 3), 7, 50),
    (1, 1, (1, 1), 1, 1),
    (3, 6, (4, 2), 16, 0),
    (6, 16, (8, 2), 16, 130, torch.float32, 100),
    (5, 4, (4, 2), 16, 70),  # four blocks in a tile of rows, and a tile that is not full
    (3, 16, (4, 2), 24, 50),
):
    cases += [(shape, mask) for mask in both]
config = kernels.choose_config(torch.float32, 64, 0)
config = dataclasses.replace(config, copy_engine=True)
for shape, mask in cases:
    case = make_case(*shape)
    order = case.ctx_end.argsort()
    ranges = [case.ctx_start[order], case.ctx_end[order]]
    window, causal = mask.get("window"), mask.get("causal", False)
    inputs = [x.double().requires_grad_() for x in case.tensors]
    scale = shape[3] ** -0.5
    wanted, wanted_lse = block_attention_naive(
        *inputs, *ranges, scale=scale, window=window, causal=causal
    )
    wanted.backward(case.grad_out.double())
    tokens = shape[4]
    unseen = torch.ones(tokens, dtype=torch.bool)
    for start, end in zip(ranges[0].tolist(), ranges[1].tolist()):
        unseen[start:end] = False
    for x in case.tensors[1:3]:
        x[unseen] = float("nan")
    blocks, slots, (q_heads, kv_heads), dim = shape[:4]
    problem = kernels.Problem(
        blocks, slots, kv_heads, q_heads // kv_heads, dim, tokens, scale, window, causal
    )
    out, lse = kernels.forward(problem, case.tensors, ranges, config)
    before = [torch.randn_like(x) for x in case.tensors[1:3]]
    after = [x.clone() for x in before]
    new = [torch.full_like(x, float("nan")) for x in before]
    args = (problem, case.grad_out, case.tensors, out, lse, ranges)
    dq, dk_blk, dv_blk = kernels.backward(*args, *after, config=config)
    kernels.backward(*args, *new, add=False, config=config)
    for x, y, z in zip(before, after, new):
        assert x[unseen].equal(y[unseen])
        assert z[unseen].count_nonzero() == 0
        assert error(y - x, z) <= 1e-5
    found = [out, lse, dq, *new, dk_blk, dv_blk]
    exact = [wanted, wanted_lse, *(x.grad for x in inputs)]
    for name, a, b in zip("out lse q k_ctx v_ctx k_blk v_blk".split(), found, exact):
        # A softmax of one key: the gradient of its score is 0, so a difference of roundings.
        limit = 1e-2 if window == 1 and name in ("q", "k_blk") else 1e-5
        assert error(a, b) <= limit, (shape, mask, name, error(a, b))
"""


@needs_interpreter
def test_interpreted_in_fp32() -> None:
    tests = os.path.dirname(__file__)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    paths = [os.path.dirname(tests), tests, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def compiled(kernel, dtype: torch.dtype, options: dict, capability: int, copy_engine: bool):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name_of = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    kinds = dict.fromkeys(("blocks", "tokens", "window"), "i32") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("ctx_start", "ctx_end"), "*i64") | {"sight": "*i32"}
    kinds |= dict.fromkeys(("lse", "shift", "delta", "dk_ctx", "dv_ctx"), "*fp32")
    constants = {key: value for key, value in options.items() if key != "num_warps"}
    if copy_engine:
        tile = f"tensordesc<{name_of}[{options.get('BLOCK_N')}, {options.get('BLOCK_D')}]>"
        kinds |= {"k_tiles": tile, "v_tiles": tile}
    else:
        constants |= {name: None for name in kernel.arg_names if name.endswith("_tiles")}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, f"*{name_of}")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": options["num_warps"]},
    )


def stack_bytes(cubin: bytes) -> int:
    """What a thread has on its stack: registers that did not fit."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found, report
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiles_to_a_cubin(shape: tuple) -> None:
    from dflash_ext.ops.block_attention import triton as kernels

    capability, dtype, dim, slots, group = shape
    problem = kernels.Problem(1024, slots, 8, group, dim, 49152, dim**-0.5, 2048, True)
    config = kernels.choose_config(dtype, dim, SHARED_MEMORY[capability])
    strides = {"STRIDE_K": 8 * dim, "STRIDE_V": 8 * dim, "HEAD_K": dim, "HEAD_V": dim}
    for kernel, options in (
        (kernels.forward_kernel, kernels.walk_options(problem, config.forward, strides)),
        (kernels.prepare_kernel, kernels.prepare_options(problem, config.prepare)),
        (kernels.query_kernel, kernels.query_options(problem, config, strides)),
        (kernels.sight_kernel, kernels.sight_options(problem, config.context.keys)),
        (kernels.context_kernel, kernels.context_options(problem, config.context, strides, True)),
    ):
        result = compiled(kernel, dtype, options, capability, config.copy_engine)
        assert result.metadata.shared <= SHARED_MEMORY[capability], kernel.fn.__name__
        # Bit 63 in descriptors of wgmma (swizzles of 32, 64 bytes): ptxas 12.8 miscompiles them.
        assert not re.search(r"(add\.s64|or\.b64)\s.*, -\d{19};", result.asm["ptx"])
        # fp32 is for checks: its products, without tensor cores, hold more than registers do.
        if dtype != torch.float32:
            assert stack_bytes(result.asm["cubin"]) == 0, kernel.fn.__name__
