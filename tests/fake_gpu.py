"""PyTorch's fake tensors on a CUDA device that is not there: devices, dtypes and memory, without values.

Autograd's engine asks the driver for streams, so :func:`backward` takes its place: it calls the nodes of the graph one by one
in the engine's order, and has gradients fit what a node expects, as the engine does. It cannot see what the engine itself does
with streams and threads, nor that the engine lets go of what a node saved as soon as the node has run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
from paper_gpu import WAITING, Machine, replace_cuda
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holotrain.planning.fake_tensors import assume_mask_share, fake_tensors, is_wrapper_subclass
from holotrain.reversible.side_stream import assuming_a_side_stream

aten = torch.ops.aten
_backwards = count(1)


def backward(loss: Tensor) -> None:
    """As ``loss.backward()``."""
    waiting, known, stack = Counter(), {loss.grad_fn}, [loss.grad_fn]
    while stack:
        for after, _ in stack.pop().next_functions:
            if after is not None:
                waiting[after] += 1
                if after not in known:
                    known.add(after)
                    stack.append(after)
    arrived: dict[Node, dict[int, Tensor]] = {loss.grad_fn: {0: torch.ones_like(loss)}}
    ready = [(-loss.grad_fn._sequence_nr(), 0, loss.grad_fn)]
    with torch.no_grad(), _in_a_backward():
        while ready:
            node = heapq.heappop(ready)[-1]
            grads, expected = arrived.pop(node, {}), node._input_metadata
            given = [_fitting(grads.pop(number, None), each) for number, each in enumerate(expected)]
            if any(grad is not None for grad in given):
                made = node.apply(*given) if hasattr(node, "apply") else node(*given)
            else:
                made = None
            made = made if isinstance(made, tuple) else (made,) * (made is not None)
            del given, grads
            for number, (after, place) in enumerate(node.next_functions):
                grad = made[number] if number < len(made) else None
                if after is None:
                    continue
                if grad is not None:
                    into = arrived.setdefault(after, {})
                    into[place] = into[place] + grad if place in into else grad
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, (-after._sequence_nr(), len(known) - len(ready), after))
            del made, node


def _fitting(grad: Tensor | None, expected: object) -> Tensor | None:
    if grad is None:
        return None
    assert grad.device == expected.device, f"a gradient is on {grad.device}, not on {expected.device}"
    grad = grad.sum_to_size(expected.shape) if grad.shape != expected.shape else grad
    return grad.to(expected.dtype)


@contextmanager
def _in_a_backward() -> Iterator[None]:
    autograd = torch._C._autograd
    before = torch._C._current_graph_task_id, autograd._get_current_graph_task_keep_graph
    number = next(_backwards)
    torch._C._current_graph_task_id = lambda: number
    autograd._get_current_graph_task_keep_graph = lambda: False
    try:
        yield
    finally:
        torch._C._current_graph_task_id, autograd._get_current_graph_task_keep_graph = before


class FakeWork(TorchDispatchMode):
    """
    Attributes:
        waits: the operations for whose result the host waited, other than choices by a mask.
        on_host: the operations that made a tensor on the host, other than a number or nothing.
        dtypes: of what they made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[str] = []
        self.waits: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if is_wrapper_subclass(types):
            return NotImplemented
        packet, tensors = function.overloadpacket, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if packet in WAITING and any(tensor.is_cuda for tensor in tensors):
            self.waits.append(str(packet))
        if packet is aten._local_scalar_dense:
            return True if args[0].dtype is torch.bool else 1.0  # a number of the host, whatever it is
        made = function(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.dtypes.update(tensor.dtype for tensor in results)
        self.on_host += [str(packet) for tensor in results if not tensor.is_cuda and tensor.dim() and tensor.numel()]
        return made


@contextmanager
def fake_gpu(monkeypatch) -> Iterator[FakeWork]:
    """Everything inside is on fake tensors, with streams on which nothing is noted. A mask selects half of what it can."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)  # or autocast would be off
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    with (
        replace_cuda(monkeypatch, Machine()),
        fake_tensors(),
        assuming_a_side_stream(),
        FakeWork() as work,
        assume_mask_share(0.5),
    ):
        yield work
