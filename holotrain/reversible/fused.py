"""The recomputation of a compiled branch and its gradients, as one compiled graph.

What autograd would save of the recomputation need not be written to memory, nothing is computed that neither the output nor the
gradients need, and the host launches one function where it would launch every operation twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from holotrain.reversible.context import graph_is_retained

Found = tuple[Tensor | None, tuple[Tensor | None, ...]]

_compiled: WeakKeyDictionary[nn.Module, Callable[..., Found]] = WeakKeyDictionary()

_traced: set[tuple[Any, ...]] = set()
"""Kinds of arguments that have been compiled."""

VARIANTS = 64
"""Kinds of branches, lengths apart, that are compiled before others run as they are."""


def compile_branch(module: nn.Module, **options: Any) -> None:
    """Compiles a branch, in place, and its recomputation with its gradients. Branches of one kind share compiled code.

    Args:
        options: of ``torch.compile``.
    """
    module.compile(**options)
    _compiled[module] = torch.compile(gradients, fullgraph=True, **options)


def is_fused(module: nn.Module) -> bool:
    """Whether :func:`compile_branch` has compiled it."""
    return module in _compiled


def gradients(
    module: nn.Module,
    trained: dict[str, Tensor],
    source: Tensor,
    grad: Tensor,
    keywords: dict[str, Any],
    differentiable: bool,
    output: bool,
) -> Found:
    """Runs a branch again.

    Args:
        trained: its parameters that get gradients, by name.
        grad: the gradient of what it returned.
        differentiable: whether the source gets a gradient.
        output: whether what it returns is needed.

    Returns:
        what it returns, or None; the gradients of the source (None: it gets none) and of the parameters.
    """
    with torch.enable_grad():
        source = source.detach().requires_grad_(differentiable)
        own = {name: parameter.detach().requires_grad_() for name, parameter in trained.items()}
        result = functional_call(module, own, (source,), keywords)
        inputs = [source] if differentiable else []
        found = torch.autograd.grad(result, [*inputs, *own.values()], grad, allow_unused=True)
    return result.detach() if output else None, found if differentiable else (None, *found)


def compiled_gradients(module: nn.Module, *arguments: Any) -> tuple[Found, bool]:
    """:func:`gradients`, compiled.

    Returns:
        what it returns; whether it could be compiled. If not, a warning says why.
    """
    try:
        with torch.no_grad():
            return _called(module, *arguments), True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many kinds
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warnings.warn(
            f"the recomputation of {type(module).__name__} cannot be compiled with its gradients, so it runs as without: {why}",
            stacklevel=2,
        )
        return gradients(module, *arguments), False


def _called(module: nn.Module, trained: dict[str, Tensor], source: Tensor, *rest: Any) -> Found:
    import torch._dynamo.exc as errors  # takes a second
    from torch._dynamo import config as compiler

    kind = type(module), (*trained,), source.shape, source.dtype, *rest[-2:]
    if kind in _traced and len(_traced) < compiler.recompile_limit:  # a change of settings takes as long as a small branch
        with suppress(errors.TorchDynamoException):  # for another reason it is to be compiled again
            return _compiled[module](module, trained, source, *rest)
    with compiler.patch(trace_autograd_ops=True, recompile_limit=VARIANTS):
        found = _compiled[module](module, trained, source, *rest)
    _traced.add(kind)
    return found


def reads_others(output: Tensor, known: list[Tensor]) -> bool:
    """Whether a gradient of an output goes to a leaf other than through these tensors, such as to a parameter of a closure."""
    leaves = {id(tensor) for tensor in known}
    ends = {(tensor.grad_fn, tensor.output_nr) for tensor in known if tensor.grad_fn is not None}
    edges: list[Any] = [] if output.grad_fn is None else [(output.grad_fn, output.output_nr)]
    for node, _ in edges:  # which grows
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            return True
        edges += [edge for edge in node.next_functions if edge[0] is not None and edge not in ends and edge not in edges]
    return False


class CannotFuse(BaseException):
    """A branch is to run in the usual way. No Exception, because a branch may catch those."""


class Fused(torch.autograd.Function):
    """Runs a branch without a graph; its gradients are computed when it runs again.

    Args:
        branch: a :class:`~holotrain.reversible.recording.Recorded`.
        supply: has it replayed, in the backward.
        source: what it reads.
        trained: its parameters that get gradients.
    """

    @staticmethod
    def forward(ctx: Any, branch: Any, supply: Callable, source: Tensor, *trained: Tensor) -> Any:
        ctx.branch, ctx.supply = branch, supply
        return branch.run_alone(source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        branch, supply = ctx.branch, ctx.supply
        if branch is None:
            raise RuntimeError(
                "trying to backward through a block a second time; call the first backward with retain_graph=True"
            )
        if not graph_is_retained():  # the loss holds this object, and so what is kept of the source
            ctx.branch = ctx.supply = None
        return None, None, *branch.gradients(gradients[0], supply)
