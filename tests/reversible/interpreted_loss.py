"""Compares the kernel of the cross-entropy with ``F.cross_entropy`` in float64, in Triton's interpreter.

Not a test by itself: test_reversible_loss_kernels.py starts it with TRITON_INTERPRET=1, set before Triton is imported, and with
the number of random cases; ``models`` in its place computes the loss of small models of transformers in tiles.
"""

import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.reversible import loss_kernels, loss_ops, tiled_loss

WORDS = (1, 2, 3, 7, 16, 31, 64, 65, 127, 200)
ROWS = (0, 1, 2, 5, 17)
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}  # the interpreter cuts bits off instead of rounding
LAYOUTS = ("contiguous", "padded rows", "transposed", "one row for all", "every other word")


@contextmanager
def fused():
    """Inside, losses on a CPU are computed by the kernel, in blocks of 64 words."""
    known = (torch.float32, *loss_ops.HALF)
    with (
        patch.object(loss_ops, "is_fused", lambda logits: logits.dtype in known),
        patch.object(loss_kernels, "MOST_WORDS", 64),
    ):
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


TOKENS = 24
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_positions": TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 4}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "gpt2": SIZES | GPT2,
    "llama": SIZES | {"num_key_value_heads": 2},
    "gemma2": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5},
    "modernbert": SIZES,  # masked
}


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if kind == "modernbert" else transformers.AutoModelForCausalLM
    return auto.from_config(transformers.AutoConfig.for_model(kind, **MODELS[kind])).to(dtype).train()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, SIZES["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 5:9], labels[1, 15:], labels[:, 10:14] = -100, -100, -100  # one tile has no label at all
    return {"input_ids": tokens, "labels": labels}


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_model(kind: str, dtype: torch.dtype, **given: Tensor) -> None:
    """The loss in tiles of four tokens, computed by the kernel, against the whole one in float64."""
    tokens, labels = batch().values()
    targets = labels if kind == "modernbert" else F.pad(labels, (0, 1), value=-100)[:, 1:]
    exact, model = model_of(kind, torch.float64), model_of(kind, dtype)
    total = F.cross_entropy(exact(input_ids=tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = total / given.get("num_items_in_batch", (targets != -100).sum())
    gradients, tiles = gradients_of(exact, expected), []

    def losses(*arguments: Any) -> Tensor:
        assert arguments[0].dtype == dtype and arguments[0].shape[0] <= 8
        tiles.append(arguments[0].shape)
        return own(*arguments)

    own, most = loss_ops.cross_entropy, 8 * SIZES["vocab_size"]
    with fused(), patch.object(loss_ops, "cross_entropy", losses), patch.object(tiled_loss, "MOST_LOGITS", {"cpu": most}):
        with tiled_loss.pending_logits(model):
            mean = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1).float(), targets.flatten())
        assert len(tiles) == -(-2 * TOKENS // 8)
        found = [] if given else [(mean, gradients_of(model, mean))]
        tiled_loss.tile_loss(model)
        tiles.clear()
        result = model(**batch(), **given)
        found.append((result.loss, gradients_of(model, result.loss)))
        assert len(tiles) == -(-2 * TOKENS // 8) and result.logits is None
    for loss, each in found:
        most = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(loss.double(), expected, rtol=most, atol=0.0)
        assert each.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (each[name].double() - gradient).norm() / max(gradient.norm().item(), 1e-3)
            assert error <= most, f"{kind}, {name}: {error}"


def check_models() -> None:
    for kind in MODELS:
        check_model(kind, torch.float32)
    check_model("llama", torch.float32, num_items_in_batch=torch.tensor(77))
    check_model("llama", torch.bfloat16)


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
