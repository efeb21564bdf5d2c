"""The kernel of the loss in tiles: numbers in Triton's interpreter against float64, code for GPUs, and what it costs there,
counted. Sums within products, on fake tensors.

As a script, with TRITON_INTERPRET=1 set before Triton is imported, this checks a number of random cases in the interpreter;
``models`` in its place computes the loss of small models of transformers in tiles.
"""

import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from covering import long, slow
from interpreted import code_for, needs_triton, run_interpreted
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from holotrain.planning.fake_tensors import fake_tensors
from holotrain.reversible import loss_ops, pending, tiled_loss
from holotrain.reversible.tiled_cross_entropy import LinearHead

WORDS = (1, 2, 3, 7, 16, 31, 64, 65, 127, 200)
ROWS = (0, 1, 2, 5, 17)
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}  # the interpreter cuts bits off instead of rounding
LAYOUTS = ("contiguous", "padded rows", "transposed", "one row for all", "every other word")


@contextmanager
def fused():
    """Inside, losses on a CPU are computed by the kernel, in blocks of 64 words."""
    from holotrain.reversible import loss_kernels  # which needs Triton

    known = (torch.float32, *loss_ops.HALF)
    with patch.object(loss_ops, "is_fused", lambda logits: logits.dtype in known), patch.object(loss_kernels, "MOST_WORDS", 64):
        yield


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values (N, V) in memory of that layout; of the fourth one, those of the first row for all."""
    rows, words = values.shape
    if layout == "padded rows":
        return torch.full((rows + 1, words + 5), torch.nan, dtype=values.dtype)[1:, 3 : words + 3].copy_(values)
    if layout == "transposed":
        return values.T.contiguous().T
    if layout == "every other word":
        return torch.full((rows, 2 * words), torch.nan, dtype=values.dtype)[:, ::2].copy_(values)
    return values[:1].expand(values.shape) if layout == "one row for all" else values.contiguous()


def exact(logits: Tensor, labels: Tensor, ignored: int, factor: float) -> tuple[Tensor, Tensor]:
    """The loss in float64, and its gradients times ``factor``."""
    leaf = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(leaf, labels.long(), reduction="sum", ignore_index=ignored)
    return loss.detach(), torch.autograd.grad(loss * factor, leaf)[0]


def check(draw: random.Random) -> None:
    """One random matrix of logits."""
    rows, words, dtype = draw.choice(ROWS), draw.choice(WORDS), draw.choice(list(ERRORS))
    values = (torch.randn(rows, words) * 2.0 ** draw.randint(-3, 5) + draw.choice((0.0, 1000.0))).to(dtype)
    if draw.random() < 0.3 and words > 1:
        values[:, draw.randrange(words - 1)] = -torch.inf  # a word that is ruled out
    leaf = laid_out(values, draw.choice(LAYOUTS if rows else LAYOUTS[:1])).requires_grad_()
    ignored = draw.choice((-100, 0))
    labels = torch.randint(0, words, (rows, 2), dtype=draw.choice((torch.int64, torch.int32)))[:, 0]  # every other number
    labels[values.gather(1, labels[:, None].long())[:, 0].isinf()] = words - 1
    labels[torch.rand(rows) < draw.choice((0.0, 0.3, 1.0))] = ignored
    factor = draw.choice((1.0, 0.5, 3.0))
    expected, gradient = exact(leaf, labels, ignored, factor)
    logits = leaf * 1.0 if draw.random() < 0.5 else leaf.view_as(leaf)
    with fused():
        found = loss_ops.summed_cross_entropy(logits, labels, ignored)
        (of_kernel,) = torch.autograd.grad(found * factor, leaf)
    what = f"{rows} x {words}, {dtype}, {leaf.stride()}, ignored {ignored}, times {factor}"
    assert found.dtype == torch.float32 and of_kernel.dtype == dtype, what
    message = lambda text: f"{what}: {text}"  # noqa: E731
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=message)
    most, least = max(ERRORS[dtype], 1e-5), ERRORS[dtype] * factor
    torch.testing.assert_close(of_kernel.double(), gradient, rtol=most, atol=least, msg=message)


def check_numbers_that_are_none() -> None:
    """NaN and infinities, as torch has them; where no label is, there is nothing of them."""
    values = torch.zeros(6, 100)
    values[0, 70], values[4, 70] = torch.nan, torch.nan
    values[1, 3], values[2], values[3, 5] = torch.inf, -torch.inf, -torch.inf
    labels = torch.tensor([1, 2, 3, 5, -100, 99])
    for row in range(len(values)):
        leaf = values[row : row + 1].clone().requires_grad_()
        with fused():
            loss = loss_ops.summed_cross_entropy(leaf * 1.0, labels[row : row + 1], -100)
            loss.backward()
        expected, gradient = exact(values[row : row + 1], labels[row : row + 1], -100, 1.0)
        if row == 4:
            expected, gradient = torch.zeros_like(expected), torch.zeros_like(gradient)
        torch.testing.assert_close(loss.double(), expected, equal_nan=True)
        torch.testing.assert_close(leaf.grad.double(), gradient, equal_nan=True)


def refused(message: str, call: Callable) -> None:
    try:
        call()
    except RuntimeError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


def check_refusals() -> None:
    for label in (-1, 7, 10**9):
        with fused():
            given = torch.zeros(2, 7), torch.tensor([0, label]), -100
            refused("a label is neither -100 nor in [0, 7)", lambda given=given: loss_ops.summed_cross_entropy(*given))
            assert loss_ops.cross_entropy(*given, False).isnan().tolist() == [False, True]
    with fused():
        assert str(loss_ops.cross_entropy(torch.zeros(2, 0), torch.tensor([-100, 0]), -100, True).tolist()) == "[0.0, nan]"
    logits = torch.randn(2, 7, requires_grad=True)
    with fused():
        with torch.no_grad():
            before = logits.clone()
            loss_ops.summed_cross_entropy(logits, torch.tensor([0, 1]), -100)
        assert torch.equal(before, logits)
        factor = torch.tensor(2.0, requires_grad=True)
        loss = loss_ops.summed_cross_entropy(logits * 1.0, torch.tensor([0, 1]), -100)
        (gradient,) = torch.autograd.grad(loss * factor, logits, create_graph=True, retain_graph=True)
        refused("once_differentiable", lambda: gradient.sum().backward())
        refused("a second backward needs a second forward", lambda: torch.autograd.grad(loss, logits))
        loss = loss_ops.summed_cross_entropy(logits.tanh(), torch.tensor([0, 1]), -100)  # tanh needs them for its gradients
        refused("modified by an inplace operation", loss.backward)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_model(name: str, dtype: torch.dtype, **given: Tensor) -> None:
    """The loss in tiles of four tokens, computed by the kernel, against the whole one in float64."""
    from test_reversible_tiled_loss import WORDS, batch, made  # in the script's folder

    tokens, labels = batch().values()
    targets = labels if name == "masked" else F.pad(labels, (0, 1), value=-100)[:, 1:]
    exact, model = made(name, dropout=False).eval(), made(name, dropout=False).to(dtype).eval()
    total = F.cross_entropy(exact(input_ids=tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = total / given.get("num_items_in_batch", (targets != -100).sum())
    gradients, tiles = gradients_of(exact, expected), []

    def losses(*arguments: Any) -> Tensor:
        assert arguments[0].dtype == dtype and arguments[0].shape[0] <= 8
        tiles.append(arguments[0].shape)
        return own(*arguments)

    for part in model.modules():
        part.training, part.p = True, 0.0  # without dropout
    own, count = loss_ops.cross_entropy, -(-tokens.numel() // 8)
    with (
        fused(),
        patch.object(loss_ops, "cross_entropy", losses),
        patch.object(pending, "MOST_LOGITS", {"cpu": 8 * WORDS}),
    ):
        with tiled_loss.pending_logits(model):
            mean = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1).float(), targets.flatten())
        assert len(tiles) == count
        found = [] if given else [(mean, gradients_of(model, mean))]
        tiled_loss.tile_loss(model)
        tiles.clear()
        result = model(**batch(), **given)
        found.append((result.loss, gradients_of(model, result.loss)))
        assert len(tiles) == count and result.logits is None
    for loss, each in found:
        most = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(loss.double(), expected, rtol=most, atol=0.0)
        assert each.keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = (each[key].double() - gradient).norm() / max(gradient.norm().item(), 1e-3)
            assert error <= most, f"{name}, {key}: {error}"


def check_models() -> None:
    for name in ("tied", "soft-capped", "masked"):
        check_model(name, torch.float32)
    check_model("its own head", torch.float32, num_items_in_batch=torch.tensor(77))
    check_model("its own head", torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("cases", [24, slow("models"), long(2000)])
def test_the_kernel_computes_what_torch_does_in_float64(cases):
    """Random sizes, dtypes, layouts and labels; small models of transformers, whose loss is taken in tiles."""
    if cases == "models":
        pytest.importorskip("transformers")
    run_interpreted(Path(__file__), cases, timeout=900)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [long(80), 90, long(100)])
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
    with torch.device("cuda"):
        leaf = (4 * torch.randn(8, words)).to(dtype).requires_grad_()
        labels = torch.randint(0, words, (8,))
        labels[3] = -100
        expected, gradient = exact(leaf, labels, -100, 1.0)
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


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "models":
        check_models()
    else:
        draw = random.Random(0)
        check_numbers_that_are_none()
        check_refusals()
        for _ in range(int(sys.argv[1])):
            check(draw)
