"""The kernel of the entropy without a GPU: its arithmetic in Triton's interpreter, and that it compiles."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gates.scores import entropy_kernel
from gates.scores.entropy_kernel import fits, launch_options, supports
from tests.gates.scores.kernel_cases import cases

ON_TRITON = pytest.mark.skipif(not entropy_kernel.HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    """What Triton's interpreter computes, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gates.scores.kernel_cases"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@ON_TRITON
@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name, *_ in cases()])
def test_entropies_and_visible_keys_are_exact(interpreted, name):
    assert interpreted["errors"][name] < 2e-5


@ON_TRITON
@pytest.mark.integration
def test_what_is_not_a_number_stays_so(interpreted):
    assert interpreted["unknown"] == [[0, 0, 3]]


@ON_TRITON
@pytest.mark.integration
def test_an_observed_model_with_grouped_queries_has_the_same_scores(interpreted):
    assert interpreted["observed"] < 1e-6


def tensor(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"mask": tensor(1, 1, 5, 7, dtype=torch.bool)}, True),
        ({"sink": tensor(4)}, True),
        ({"mask": tensor(1, 1, 5, 7, dtype=torch.float64)}, False),
        ({"mask": tensor(1, 1, 5, 7).to("meta")}, False),
        ({"softcap": 30.0}, False),
        ({"scale": -1.0}, False),
        ({"key": tensor(2, 2, 7, 64, dtype=torch.float32)}, False),
        ({"query": tensor(2, 4, 5, 64, dtype=torch.float64), "key": tensor(2, 2, 7, 64, dtype=torch.float64)}, False),
        ({"query": tensor(2, 4, 5, 512), "key": tensor(2, 2, 7, 512)}, False),
        ({"query": tensor(0, 4, 5, 64), "key": tensor(0, 2, 7, 64)}, False),
    ],
)
def test_inputs_that_the_kernel_takes(more, expected):
    given = {"query": tensor(2, 4, 5, 64), "key": tensor(2, 2, 7, 64), "scale": 0.125} | more
    assert fits(**given) == expected
    assert not supports(**given), "a CPU runs no kernel"


@ON_TRITON
@pytest.mark.integration
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "mask"),
    [
        *((dtype, dim, causal, None) for dtype in ("bf16", "fp32") for dim in (32, 64, 128) for causal in (False, True)),
        ("bf16", 256, True, None),
        ("bf16", 64, False, "u8"),
        ("bf16", 128, False, "fp32"),  # most shared memory
        ("fp32", 64, False, "fp32"),
    ],
)
def test_it_compiles_for_a_gpu_and_fits_its_shared_memory(dtype, head_dim, causal, mask, tmp_path, monkeypatch):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = entropy_kernel._entropy_kernel
    constants = launch_options({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], head_dim)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    constants |= {"causal": causal, "one_row": False, "has_sink": False, "hiding": -1e38, "head_dim": head_dim, "sink": None}
    constants["mask_kind"] = {None: "none", "u8": "bool"}.get(mask, "summand")
    constants |= {"mask_key": 1} if mask else {"mask": None, "seen_first": None, "seen_last": None}
    types = {"query": f"*{dtype}", "key": f"*{dtype}", "mask": f"*{mask}", "entropy": "*fp32", "scale": "fp32"}
    types |= {"one_over_scale": "fp32", "seen_first": "*i32", "seen_last": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    multiples = [name for name in signature if name not in constants and (name in types or name.endswith(("_b", "_h", "_row")))]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples if signature[name] != "fp32"}
    compiled = compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
    assert compiled.metadata.shared <= 99 * 1024
    assert ("wgmma" in compiled.asm["ptx"]) == (dtype == "bf16"), "float32 is not rounded for tensor cores"
