"""The device of the tests in this folder: a GPU, or what HEAD_GATES_GPU_TESTS_ON names, so that a CPU can run their code."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """The device under test; the test is skipped where there is none."""
    name = os.environ.get("HEAD_GATES_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; HEAD_GATES_GPU_TESTS_ON=cpu runs these tests on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # to compare with the CPU
    return torch.device(name)


@pytest.fixture(scope="session")
def on_device(device):
    """The options that put a run on the device."""
    accelerator = "gpu" if device.type == "cuda" else device.type
    return ["--trainer.accelerator", accelerator, "--trainer.devices", "1"]
