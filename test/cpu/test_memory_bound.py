"""No prefill operator makes a tensor that grows with the square of the prompt: counted tensor by tensor, and as the
process's peak, never timed."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hisparse.cpu.indexer import ragged_top_k
from hisparse.cpu.quantize import act_quant
from hisparse.cpu.scratch import BLOCK_BYTES
from hisparse.cpu.sparse_attention import sparse_attention

PROMPT, CHUNK, TOP_K = 16_384, 2_048, 256
PEAK_BYTES = 256 * 2**20


def indexer() -> None:
    """The last chunk of the prompt against all of it. In one block its scores alone would take 512 MiB."""
    queries, weights = act_quant(torch.randn(CHUNK, 4, 128))[0], torch.randn(CHUNK, 4)
    keys, scale = act_quant(torch.randn(PROMPT, 128))
    ends = torch.arange(PROMPT - CHUNK + 1, PROMPT + 1)
    selected = ragged_top_k(queries, weights, keys, scale.squeeze(1), torch.zeros_like(ends), ends, TOP_K)
    assert selected.shape == (CHUNK, TOP_K)


def attention() -> None:
    """The whole prompt in one call. In one block its gathered rows alone would take 1.5 GiB."""
    rows = torch.randn(PROMPT, 96).bfloat16()
    indices = torch.randint(0, PROMPT, (PROMPT, TOP_K), dtype=torch.int32)
    out = sparse_attention(torch.randn(PROMPT, 2, 96).bfloat16(), rows, indices, 0.1, 64)
    assert out.shape == (PROMPT, 2, 64)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


@pytest.mark.parametrize("operator", [indexer, attention])
def test_largest_tensor(operator):
    with LargestTensor() as counted:
        operator()
    assert 2**20 < counted.bytes <= BLOCK_BYTES, f"largest tensor: {counted.bytes / 2**20:.0f} MiB"


@pytest.mark.parametrize("operator", ["indexer", "attention"])
def test_peak_of_the_process(operator):
    command = [sys.executable, __file__, operator]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(result.stdout)
    assert 2**20 < grown < PEAK_BYTES, f"peak memory grew by {grown / 2**20:.0f} MiB"


def peak_bytes() -> int:
    """Most memory this program has held; unlike getrusage's maximum, not inherited from the process that started it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    tiny = torch.ones(8, 8)
    (tiny @ tiny).topk(2)  # what the libraries allocate once
    before = peak_bytes()
    {"indexer": indexer, "attention": attention}[sys.argv[1]]()
    print(peak_bytes() - before)
