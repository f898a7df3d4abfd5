"""SGLang's fused top-k, asked for positions, selects what torch selects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]


@pytest.mark.parametrize("lengths", [[1, 100, 2047, 2048], [2049, 9000, 30_000], [131_072, 70_000, 5]], ids=str)
def test_positions_are_those_of_the_largest(lengths: list[int]) -> None:
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from hisparse.plugin.top_k import PositionTopK

    top_k, rows, width = 2048, len(lengths), max(lengths) + 3 & ~3
    logits = torch.randn(rows, width, device="cuda")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    pages = torch.randint(0, 1 << 20, (rows, width // 64 + 1), dtype=torch.int32, device="cuda")
    metadata = SimpleNamespace(real_page_table=pages, topk_v2_plan=plan_topk_v2(seq_lens), page_size=64)
    positions = PositionTopK(DSATopKBackend.SGL_KERNEL, fused=True).topk_transform(logits, seq_lens, top_k, metadata)
    for row, length in enumerate(lengths):
        expected = logits[row, :length].topk(min(top_k, length)).indices.sort().values
        found = positions[row].sort().values
        assert torch.equal(found[found >= 0].long(), expected)
        assert int((found < 0).sum()) == top_k - len(expected)
