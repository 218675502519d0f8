"""Right casts for Triton's interpreter, so that SGLang's own kernels can be trusted on a CPU.

    fp32 -> e4m3    without: 31.6 -> 16 (wrong in one code of twenty)     with: 32, as on a GPU
    fp32 -> bf16    without: cut off                                      with: nearest, ties to even

triton 3.8.0 (with SGLang 0.5.23) runtime/interpreter.py, _convert_float: without a rounding mode it cuts the mantissa
off; bf16 -> fp32 is wrong for subnormals. Torch rounds like the GPU's conversion instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exact_casts() -> Iterator[None]:
    """Replaces the interpreter's casts between fp32, bf16 and e4m3 by torch's while the block runs."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    kinds = {
        tl.float32: (torch.float32, torch.int32, np.uint32),
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in kinds or target not in kinds:
            return original(data, source, target, rounding)
        given, given_integers, _ = kinds[source]
        wanted, integers, unsigned = kinds[target]
        raw = np.ascontiguousarray(data).reshape(-1).view(np.dtype(str(given_integers).removeprefix("torch.")))
        values = torch.from_numpy(raw.copy()).view(given)
        return values.to(wanted).view(integers).numpy().view(unsigned).reshape(data.shape)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = original
