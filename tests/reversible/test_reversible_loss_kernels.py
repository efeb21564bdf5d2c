"""The kernel of the loss in tiles: numbers in Triton's interpreter, code for GPUs, and what it costs there, counted.
Sums within products, on fake tensors."""

from pathlib import Path

import pytest
import torch
from covering import long, slow
from interpreted import code_for, needs_triton, run_interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from holotrain.planning.fake_tensors import fake_tensors
from holotrain.reversible import loss_ops
from holotrain.reversible.tiled_cross_entropy import LinearHead


@needs_triton
@pytest.mark.parametrize("cases", [40, slow("models"), long(2000)])
def test_the_kernel_computes_what_torch_does_in_float64(cases):
    """Random sizes, dtypes, layouts and labels; small models of transformers, whose loss is taken in tiles."""
    pytest.importorskip("transformers")
    run_interpreted(Path(__file__).with_name("interpreted_loss.py"), cases, timeout=900)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ["_cross_entropy", "_scale"])
def test_code_for_a_gpu_reads_and_writes_wide_where_rows_are_aligned(kernel, dtype, capability):
    """128 bits at once. GPT-2's 50,257 words are not: 128 bits that are not aligned to 128 bits are a fault there."""
    from holotrain.reversible import loss_kernels

    function = getattr(loss_kernels, kernel)
    kinds = dict.fromkeys(("logits", "gradients"), f"*{dtype}") | dict.fromkeys(("losses", "scale"), "*fp32")
    kinds |= {"labels": "*i64"} | dict.fromkeys(("stride", "words", "ignored"), "i32")
    constants = {"DIFFERENTIATE": True} if kernel == "_cross_entropy" else {}
    constants["BLOCK"] = loss_kernels.MOST_WORDS
    for aligned in (True, False):
        multiples = {name for name, kind in kinds.items() if kind.startswith("*")} | ({"stride", "words"} if aligned else set())
        made = code_for(capability, function, kinds, constants, multiples, num_warps=8)
        assert ("ld.global.v4.b32" in made) == ("st.global.v4.b32" in made) == aligned
    single = {"stride": 1, "words": 1}  # Triton makes constants of ones
    code_for(capability, function, kinds, constants | single | {"BLOCK": 1}, (), num_warps=4)


class Made(TorchDispatchMode):
    """The operations, and the largest new tensor of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(result, torch.Tensor) and result is not (kwargs or {}).get("out") and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_the_gradient_of_the_weight_is_summed_in_the_product(dtype):
    """Of a head with 50 words and 8 features, in fp32, by operands in half precision."""
    loss_ops._adds_in_product.cache_clear()
    with fake_tensors():
        total, gradient = torch.empty(50, 8, device="cuda"), torch.empty(3, 50, device="cuda", dtype=dtype)
        x = torch.empty(3, 8, device="cuda", dtype=dtype)
        assert loss_ops.adds_in_product(total, dtype) and not loss_ops.adds_in_product(total.double(), dtype)
        assert not loss_ops.adds_in_product(total.cpu(), dtype)
        with Made() as made:
            loss_ops.add_product(total, gradient.T, x)
    assert made.names[-1] == "aten.addmm.dtype_out" and made.largest == 0
    loss_ops._adds_in_product.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_the_head_are_sums_over_tiles(dtype):
    weight = torch.randn(50, 8, dtype=dtype, requires_grad=True)
    pieces, head = (torch.randn(3, 10, 8, dtype=dtype), torch.randn(3, 10, 50, dtype=dtype)), LinearHead(weight, None)
    for x, gradient in zip(*pieces, strict=True):
        head(x.requires_grad_()).backward(gradient)
    expected = torch.einsum("tbv,tbc->vc", pieces[1].double(), pieces[0].detach().double())
    assert weight.grad is None and head.sums[weight].dtype == torch.float32
    torch.testing.assert_close(head.sums[weight].double(), expected, rtol=0.0, atol=1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "Qwen3-0.6B"])
def test_a_tile_of_the_loss_moves_its_logits_three_times(name, monkeypatch):
    """Twice read and once written, 6 bytes of bf16, beside the products; torch's operations move more than 36."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import bench_counted

    rows = bench_counted.tile_rows(name)
    assert rows["one kernel"]["bytes_a_logit"] <= 6.5 and rows["torch's operations"]["bytes_a_logit"] > 36


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [1, 50257, 151936])
def test_a_gpu_computes_what_torch_does_in_float64(words, dtype):
    import interpreted_loss as cases

    with torch.device("cuda"):
        leaf = (4 * torch.randn(8, words)).to(dtype).requires_grad_()
        labels = torch.randint(0, words, (8,))
        labels[3] = -100
        expected, gradient = cases.exact(leaf, labels, -100, 1.0)
        assert loss_ops.is_fused(leaf)
        found = loss_ops.summed_cross_entropy(leaf * 1.0, labels, -100)
        found.backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        error = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=max(error, 1e-5), atol=error)
        total, x = torch.randn(words, 16), torch.randn(8, 16).to(dtype)
        product = total.double() + leaf.grad.T.double() @ x.double()
        loss_ops.add_product(total, leaf.grad.T, x)
        torch.testing.assert_close(total.double(), product, rtol=1e-3, atol=1e-3)
