"""The precision in which products and convolutions of float32 are computed."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matmul_precision(precision: str) -> Generator[None]:
    """Inside, products and convolutions of float32 have this precision, one of ``torch.set_float32_matmul_precision``; with
    ``highest`` nothing is in TF32, in which torch alone computes convolutions."""
    backends: Any = torch.backends  # whose stubs lack fp32_precision
    convolutions = backends.cudnn.conv, backends.cudnn.rnn
    saved, wholes = [], (backends, backends.cudnn)
    parts = (*wholes, backends.cuda.matmul, backends.mkldnn.matmul, *convolutions)
    for part in parts:  # a part that says "none" reads as the whole does, so the wholes are "none" while parts are read
        saved.append(part.fp32_precision)
        if part in wholes:
            part.fp32_precision = "none"
    for whole, value in zip(wholes, saved, strict=False):
        whole.fp32_precision = value
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # after a use of fp32_precision torch refuses to read these
        before = "highest", True  # as torch begins
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    for part in convolutions:  # allow_tf32=False alone leaves them to torch.backends.fp32_precision
        part.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        for part, value in zip(parts, saved, strict=True):
            part.fp32_precision = value
