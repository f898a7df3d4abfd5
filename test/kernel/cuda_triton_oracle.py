"""The quantisation of `fp8_ds_mla` rows in Triton's operators: the oracle for the CUDA store's bits."""

import triton
import triton.language as tl


@triton.jit
def quantise_groups(groups, values, scales, FP8_MAX: tl.constexpr, GROUP: tl.constexpr):
    """One program a group: bf16 groups [n, GROUP] -> fp8 values [n, GROUP], float32 scales [n]."""
    group = tl.program_id(0)
    lane = tl.arange(0, GROUP)
    x = tl.load(groups + group * GROUP + lane).to(tl.float32)
    scale = tl.max(tl.abs(x)) / FP8_MAX
    inverse = 1.0 / scale
    quantised = tl.clamp(x * inverse, -FP8_MAX, FP8_MAX).to(values.dtype.element_ty)
    tl.store(values + group * GROUP + lane, quantised)
    tl.store(scales + group, scale)
