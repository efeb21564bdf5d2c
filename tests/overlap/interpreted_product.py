"""Runs the signaling product in Triton's interpreter and prints the largest error and the counts as JSON.

Not a test by itself: test_overlap_signals.py starts it with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

import json

import torch

from holotrain.overlap.groups import spans
from holotrain.overlap.kernel import launch
from holotrain.overlap.signals import tiles_of


def product(sizes: list[int], ranks: int, inner: int, columns: int, dtype: torch.dtype, bias: bool, transposed: bool) -> dict:
    torch.manual_seed(0)
    rows, cut = sum(sizes), list(spans(sizes))
    x = torch.randn(ranks, rows, inner).to(dtype)
    matrix = torch.randn(columns, inner).to(dtype).t() if transposed else torch.randn(inner, columns).to(dtype)
    summand = torch.randn(columns).to(dtype) if bias else None
    out = torch.full((ranks * rows, columns), float("nan"), dtype=dtype)
    counts = torch.zeros(len(sizes), dtype=torch.int32)
    tiles = tiles_of(cut, ranks, rows, columns)
    launch(x.flatten(0, 1), matrix, summand, out, tiles, counts, programs=3)
    true = x.double() @ matrix.double() + (summand.double() if bias else 0)
    true = torch.cat([true[:, span].flatten(0, 1) for span in cut])  # rows of a group from all ranks, one after the other
    error = ((out.double() - true).abs().max() / true.abs().max()).item()
    due = tiles[:, 4].bincount().tolist()
    return {"error": error, "counts": counts.tolist(), "due": due}


CASES = {
    "one tile": ([5], 1, 7, 9, torch.float32, False, True),
    "groups that are no whole tiles": ([130, 1, 150], 1, 70, 150, torch.float32, True, True),
    "shares of two ranks": ([100, 33], 2, 70, 140, torch.float32, True, False),
    "half precision": ([130, 60], 1, 130, 40, torch.float16, True, True),
}

print(json.dumps({name: product(*case) for name, case in CASES.items()}))
