"""A Triton kernel whose blocks say which SM they ran on. Only for where there is Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def numbers(out, spins):  # type: ignore[no-untyped-def]
    """Each block writes the number of its SM, after some work so that all SMs get some."""
    block = tl.program_id(0)
    x = block.to(tl.float32)
    for _ in range(spins):
        x = x * 1.000001 + 0.5
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + block, tl.where(x < -1.0, -1, sm))
