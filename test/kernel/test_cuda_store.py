"""The write-through store on CUDA: bf16 rows against the reference, fp8 rows against Triton's arithmetic."""

from __future__ import annotations

import pytest
import torch

from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat
from hisparse_kernel import cuda_ops, reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
POISON = 0x5A
BUFFER, PAGE, REGIONS, SLOTS = 100, 64, 12, 300
FORMATS = {
    "deepseek": Bf16Row(),
    "smallest": Bf16Row(nope_dim=4, rope_dim=4),
    "parts not whole chunks": Bf16Row(nope_dim=500, rope_dim=76),
    "odd parts": Bf16Row(nope_dim=21, rope_dim=3),
}


def parts(num_tokens: int, row_format: RowFormat, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """k_nope and k_rope, as tensors of their own or as views in the layouts SGLang passes."""
    nope, rope = row_format.nope_dim, row_format.rope_dim
    joint = torch.randn(num_tokens, nope + rope, device=DEVICE).bfloat16()
    if layout == "views":
        return joint[:, :nope], joint[:, nope:]
    if layout == "middle dimension":
        return joint[:, :nope].unsqueeze(1), joint[:, nope:].unsqueeze(1)
    if layout == "unaligned":
        shifted = torch.randn(num_tokens, nope + rope + 3, device=DEVICE).bfloat16()
        return shifted[:, 1 : 1 + nope], shifted[:, 1 + nope : 1 + nope + rope]
    return joint[:, :nope].contiguous(), joint[:, nope:].contiguous()


LAYOUTS = ["own", "views", "middle dimension", "unaligned"]


def host_pool(row_format: RowFormat) -> torch.Tensor:
    return torch.full((SLOTS, row_format.row_bytes), POISON, dtype=torch.uint8).pin_memory()


def device_rows(num_rows: int, row_format: RowFormat) -> torch.Tensor:
    return torch.full((num_rows, row_format.row_bytes), POISON, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_store_equals_the_reference(name: str, layout: str, dtype: torch.dtype) -> None:
    row_format, batch = FORMATS[name], 10
    for num_real in (0, 1, 7, 10):
        k_nope, k_rope = parts(batch, row_format, layout)
        arguments = {
            "k_nope": k_nope,
            "k_rope": k_rope,
            "slots": torch.randperm(SLOTS, device=DEVICE)[:batch].to(dtype),
            "seq_lens": torch.randint(1, 1000, (batch,), device=DEVICE).to(dtype),
            "req_pool_indices": (torch.randperm(REGIONS - 1, device=DEVICE)[:batch] + 1).to(dtype),
            "num_real_reqs": torch.tensor([num_real], dtype=torch.int32, device=DEVICE),
            "device_buffer_size": BUFFER,
            "page_size": PAGE,
            "row_format": row_format,
        }
        results = []
        for op in (cuda_ops.store_decode, reference.store_decode):
            host, hot = host_pool(row_format), device_rows(REGIONS * (BUFFER + PAGE), row_format)
            op(**arguments, host_rows=host, hot_rows=hot)
            torch.cuda.synchronize()
            results.append((host.clone(), hot))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 257])
def test_extend_store_equals_the_reference(name: str, layout: str, num_tokens: int) -> None:
    row_format = FORMATS[name]
    k_nope, k_rope = parts(num_tokens, row_format, layout)
    slots = torch.randperm(SLOTS, device=DEVICE)[:num_tokens]
    row_ids = torch.randperm(400, device=DEVICE)[:num_tokens].int()
    results = []
    for op in (cuda_ops.store_extend, reference.store_extend):
        host, workspace = host_pool(row_format), device_rows(400, row_format)
        op(
            k_nope=k_nope,
            k_rope=k_rope,
            slots=slots,
            row_ids=row_ids,
            host_rows=host,
            workspace=workspace,
            row_format=row_format,
        )
        torch.cuda.synchronize()
        results.append((host.clone(), workspace))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def store_fp8(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """What the kernel stores, after checking that host and device got the same rows."""
    n, row_format = k_nope.shape[0], Fp8DsMlaRow()
    host = torch.full((n, row_format.row_bytes), POISON, dtype=torch.uint8).pin_memory()
    workspace = device_rows(n, row_format)
    ids = torch.arange(n, device=DEVICE)
    cuda_ops.store_extend(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=ids,
        row_ids=ids,
        host_rows=host,
        workspace=workspace,
        row_format=row_format,
    )
    torch.cuda.synchronize()
    assert torch.equal(host, workspace.cpu())
    return workspace


def every_amax() -> torch.Tensor:
    """bf16 [n, 512]: each finite positive bf16 value is the largest of some group of 128, at a random place."""
    largest = torch.arange(1, 0x7F80, device=DEVICE).short().view(torch.bfloat16)
    largest = torch.cat((largest, largest[: -largest.numel() % 4]))
    groups = (
        largest.double().unsqueeze(1) * (torch.rand(largest.numel(), 128, device=DEVICE).double() * 2 - 1)
    ).bfloat16()
    sign = torch.randint(0, 2, largest.shape, device=DEVICE) * 2 - 1
    groups.scatter_(1, torch.randint(0, 128, (largest.numel(), 1), device=DEVICE), (largest * sign).unsqueeze(1))
    assert torch.equal(groups.abs().amax(1), largest)
    return groups.view(-1, 512)


def triton_quantised(k_nope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 bytes [n, 512] and scales [n, 4] by Triton's own operators: `/`, clamp, conversion."""
    triton = pytest.importorskip("triton", reason="the oracle is Triton's arithmetic")
    from cuda_triton_oracle import quantise_groups

    groups = k_nope.reshape(-1, 128).contiguous()
    values = torch.empty(groups.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(groups.shape[0], dtype=torch.float32, device=DEVICE)
    quantise_groups[(groups.shape[0],)](groups, values, scales, FP8_MAX=448.0, GROUP=triton.next_power_of_2(128))
    return values.view(torch.uint8).view(-1, 512), scales.view(-1, 4)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_bits_are_tritons_for_every_amax(seed: int) -> None:
    torch.manual_seed(seed)
    k_nope = every_amax()
    k_rope = torch.randn(k_nope.shape[0], 64, device=DEVICE).bfloat16()
    rows = store_fp8(k_nope, k_rope)
    values, scales = triton_quantised(k_nope)
    assert torch.equal(rows[:, 512:528].contiguous().view(torch.float32), scales)
    assert torch.equal(rows[:, :512], values)
    assert torch.equal(rows[:, 528:].contiguous().view(torch.bfloat16), k_rope)


def test_fp8_bits_are_sglangs_for_every_amax() -> None:
    """Against the installed SGLang's own store path; only where it is installed."""
    quant = pytest.importorskip("sglang.kernels.ops.attention.dsa.quant_k_cache", reason="SGLang is not installed")
    torch.manual_seed(7)
    k_nope = every_amax()
    k_rope = torch.randn(k_nope.shape[0], 64, device=DEVICE).bfloat16()
    nope_part, rope_part = quant.quantize_k_cache_separate(k_nope, k_rope)
    stored = torch.cat((nope_part.flatten(1), rope_part.flatten(1)), dim=1)
    assert torch.equal(store_fp8(k_nope, k_rope), stored)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_decode_store_packs_like_the_extend_store(layout: str) -> None:
    row_format, batch = Fp8DsMlaRow(), 9
    k_nope, k_rope = parts(batch, row_format, layout)
    hot = device_rows(REGIONS * (BUFFER + PAGE), row_format)
    host = host_pool(row_format)
    slots, regions = torch.arange(batch, device=DEVICE) * 3, torch.arange(1, batch + 1, device=DEVICE)
    seq_lens = torch.arange(60, 60 + batch, device=DEVICE)
    cuda_ops.store_decode(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=slots,
        seq_lens=seq_lens,
        req_pool_indices=regions,
        num_real_reqs=torch.tensor([batch], dtype=torch.int32, device=DEVICE),
        host_rows=host,
        hot_rows=hot,
        device_buffer_size=BUFFER,
        page_size=PAGE,
        row_format=row_format,
    )
    torch.cuda.synchronize()
    rows = store_fp8(k_nope, k_rope)
    assert torch.equal(hot[regions * (BUFFER + PAGE) + BUFFER + (seq_lens - 1) % PAGE], rows)
    assert torch.equal(host[slots.cpu()], rows.cpu())
    assert (hot == POISON).all(1).sum() == hot.shape[0] - batch


def test_fp8_zero_groups_store_zeros() -> None:
    k_nope = torch.zeros(3, 512, device=DEVICE).bfloat16()
    k_nope[1, 128:256] = 2.0
    rows = store_fp8(k_nope, torch.zeros(3, 64, device=DEVICE).bfloat16())
    assert torch.equal(rows.cpu(), Fp8DsMlaRow().pack(k_nope.cpu(), torch.zeros(3, 64).bfloat16()))


def test_fp8_store_agrees_with_the_row_format_up_to_division() -> None:
    """The row format divides exactly, Triton does not quite: scales agree to 2 units in the last place."""
    k_nope, k_rope = torch.randn(500, 512, device=DEVICE).bfloat16(), torch.randn(500, 64, device=DEVICE).bfloat16()
    mine = store_fp8(k_nope, k_rope)[:, 512:528].contiguous().view(torch.int32)
    exact = Fp8DsMlaRow().pack(k_nope, k_rope)[:, 512:528].contiguous().view(torch.int32)
    assert (mine - exact).abs().max() <= 2


def test_slots_and_rows_that_do_not_exist_are_left_out() -> None:
    row_format = Bf16Row()
    k_nope, k_rope = parts(4, row_format, "own")
    host, workspace = host_pool(row_format), device_rows(10, row_format)
    cuda_ops.store_extend(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=torch.tensor([-1, SLOTS, 5, 6], device=DEVICE),
        row_ids=torch.tensor([0, 1, -1, 10], device=DEVICE),
        host_rows=host,
        workspace=workspace,
        row_format=row_format,
    )
    torch.cuda.synchronize()
    rows = row_format.pack(k_nope, k_rope)
    assert torch.equal(workspace[:2], rows[:2]) and (workspace[2:] == POISON).all()
    assert torch.equal(host[5:7], rows[2:].cpu()) and int((host == POISON).all(1).sum()) == SLOTS - 2
