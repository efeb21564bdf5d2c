"""The kernels of the two-step coupling: numbers in Triton's interpreter, code for GPUs, and what they cost there, counted."""

from pathlib import Path

import pytest
import torch
from covering import long
from interpreted import code_for, needs_triton, run_interpreted

from holotrain.reversible import coupling_ops
from holotrain.reversible.grid import Grid
from holotrain.reversible.two_step import TwoStep, weights


@needs_triton
@pytest.mark.parametrize("cases", ["model", 50, long(1000)])
def test_kernels_compute_what_several_operations_do(cases):
    """Bit for bit: random shapes, dtypes, layouts, signs and numbers of bits, and the gradients of a whole model."""
    run_interpreted(Path(__file__).with_name("interpreted_coupling.py"), cases, timeout=500)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("streams", ["fp32", "fp64"])
@pytest.mark.parametrize("kernel", ["_couple", "_uncouple", "_gradients"])
def test_code_for_a_gpu_reads_wide_and_contracts_nothing(kernel, streams, capability):
    """A product and a sum in one instruction round once, and the inverse would no longer be one."""
    from holotrain.reversible import coupling_kernels

    function = getattr(coupling_kernels, kernel)
    flags = {"BITS": 3, "KEPT": True, "NARROW": True, "PASSED": True, "ALIGNED": True, "WIDE": False}
    constants = {"EIGHTS": coupling_kernels.EIGHTS} | {name: flags[name] for name in function.arg_names if name in flags}
    parameters = [name for name in function.arg_names if name not in constants]
    kinds = dict.fromkeys(parameters, f"*{streams}") | dict.fromkeys(("update", "narrow", "of_update"), "*bf16")
    kinds |= {"low": "*u8"} | dict.fromkeys(("count", "sample_stride", "batch", "planes"), "i32")
    for name in ("weight_above", "weight_below", "rest_above", "rest_below", "gain"):
        kinds[name] = "fp32" if streams == "fp32" else "i64"
    aligned = {"count", *(name for name, kind in kinds.items() if kind.startswith("*"))}
    made = code_for(capability, function, kinds, constants, aligned, num_warps=4, enable_fp_fusion=False)
    assert "fma." not in made and "ld.global.v4.b32" in made


@pytest.mark.parametrize("streams", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_are_given_the_factors_that_tensors_have(streams, dtype):
    sign = torch.tensor([1.0, -1.0], dtype=streams)
    for m in (None, *range(1, 9)):
        pair = (weights([m or 4, 2, 2, 4], 1)[0], weights([m or 4, 2, 2, 4], -1)[0])
        coupling = TwoStep(Grid(torch.tensor(1.0, dtype=streams), False), sign, (), sign, pair, m, True)
        a, rest = coupling._factors()
        assert coupling_ops.factors(pair, m, streams, dtype) == (*a.to(dtype).tolist(), *rest.to(dtype).tolist())


@pytest.mark.slow
def test_the_coupling_is_cheap_beside_checkpointing(monkeypatch):
    """Of a block of Llama's size, forward and backward, in work on elements alone."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import bench_counted

    row = bench_counted.rows_of("Llama 4096/11008, 2,048 tokens, bf16")["make_reversible"]
    assert row["kernels_over_checkpointing"] <= 15 and row["bytes_an_element"] <= 60


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_its_several_operations_do(dtype):
    import interpreted_coupling as cases

    with torch.device("cuda"):
        cases.train(dtype)
