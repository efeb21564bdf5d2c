"""The step split between a GPU and its CPU: the CPU computes while the GPU goes on, and the result is applied a step late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from holotrain.synthesis.binding import narrowed, widened
from holotrain.synthesis.keys import Layer, pairs, shares_of
from holotrain.synthesis.options import SynthesisOptions
from holotrain.synthesis.updates import SYNCHRONOUS, Updates, arriving, figures, total

Stored = dict[str, list[Tensor]]
"""Updates by the names of parameters, as :func:`~holotrain.synthesis.binding.narrowed` gives them."""

Event = torch.cuda.Event | None


class Delayed:
    """Updates that a thread computes on the CPU, from gradients in pinned memory. Each step applies those of the step before.

    All copies between GPU and CPU are asynchronous, on a stream of their own. Without a GPU the thread and the delay are the
    same. The updates of the first step are zero.

    Takes the arguments of :class:`~holotrain.synthesis.updates.Updates`.
    """

    def __init__(self, layers: list[Layer], options: SynthesisOptions, like: Tensor) -> None:
        if shares_of(layers) > 1:
            raise ValueError("split=cpu: FSDP2 shards the gradients; use split=none")
        self._device, self._dtype = like.device, like.dtype
        self._parameters = dict(pairs(layers))
        # They stand for the parameters in the memory of one entry, since only their gradients are used.
        hosts = {name: p.detach().new_zeros((), device="cpu").expand(p.shape) for name, p in self._parameters.items()}
        self._hosts = {name: nn.Parameter(host) for name, host in hosts.items()}
        on_host = [Layer(layer.module, {name: self._hosts[name] for name in layer.parameters}) for layer in layers]
        self._updates = Updates(on_host, options, like.cpu())
        self.key_length = self._updates.key_length
        self._late = self._nothing()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="synthesis")
        self._working: Future | None = None
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._aside = nullcontext if self._copies is None else partial(torch.cuda.stream, self._copies)

    def step(self, grads: list[Tensor], keys: Tensor, step: int, measuring: bool) -> tuple[Callable[[], bool], Tensor | None]:
        """As :meth:`Updates.step`, but it replaces gradients by the updates of the step before. A skipped step leaves these.

        On a GPU the thread finds NaN and infinity, so that nobody waits for the GPU. Then the update is missing, and the next
        step, which would apply it, is the one that is skipped. A gradient that is not covered is used now: it is waited for.
        """
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        at_once = self._device.type in SYNCHRONOUS or len(grads) > len(gradients)
        if at_once and not arriving(total([*grads, keys]).isfinite())():
            return lambda: False, None
        self._finish()
        late = self._late
        copies, keys, copied = self._on_the_way(gradients, keys)
        self._working = self._thread.submit(self._compute, copies, keys, copied, step if late else step - 1)
        if copied is not None:  # the next backward may write into the same memory, such as DDP's buckets
            torch.cuda.current_stream(self._device).wait_event(copied)
        for name, parameter in self._parameters.items():
            stored = late.get(name)
            parameter.grad = None if stored is None else widened(stored, parameter.dtype).to(parameter.dtype).view_as(parameter)
        return lambda: bool(late), self._figures(gradients) if measuring and late else None

    def _on_the_way(self, grads: dict[str, Tensor], keys: Tensor) -> tuple[dict[str, Tensor], Tensor, Event]:
        """Starts copying to the host. Returns the copies, and an event after which they are complete."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in (*grads.values(), keys):
                tensor.record_stream(self._copies)
        with self._aside():
            # Towards the host this allocates pinned memory, which a cache takes back.
            copies = {name: grad.to("cpu", non_blocking=True, copy=True) for name, grad in grads.items()}
            keys = keys.to("cpu", non_blocking=True)
            return copies, keys, None if self._copies is None else self._copies.record_event()

    def _compute(self, grads: dict[str, Tensor], keys: Tensor, copied: Event, step: int) -> tuple[Stored, Event]:
        """In the thread: computes the updates, and starts copying them to the device."""
        if copied is not None:
            copied.synchronize()
        with torch.no_grad(), self._aside():
            for name, host in self._hosts.items():
                host.grad = grads.get(name)
            finite, _ = self._updates.step(list(grads.values()), keys, step, False)
            grads = grads if finite() else {}
            found = {name: narrowed(grad.view(1, -1), self._updates.half) for name, grad in grads.items()}
            late = {name: [part.to(self._device, non_blocking=True) for part in stored] for name, stored in found.items()}
            return late, None if self._copies is None else self._copies.record_event()

    def _finish(self) -> None:
        """Waits for the thread; the current stream waits for the copies."""
        if self._working is None:
            return
        working, self._working = self._working, None  # so that an error is raised once
        self._late, arrived = working.result()
        if arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(arrived)
            for tensor in chain.from_iterable(self._late.values()):
                tensor.record_stream(current)

    def _figures(self, gradients: dict[str, Tensor]) -> Tensor:
        """Of the updates as applied, against the gradients of this step."""
        products = []
        for name, gradient in gradients.items():
            update = self._parameters[name].grad
            g, u = (t.view(-1).to(self._dtype) for t in (gradient, torch.zeros_like(gradient) if update is None else update))
            products.append(torch.stack((g @ g, g @ u, u @ u)))
        return figures(torch.stack(products, 1))

    def _nothing(self) -> Stored:
        """Updates of zero."""
        return {name: narrowed(p.new_zeros(1, p.numel()), self._updates.half) for name, p in self._parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """The tensors kept between steps, by name: those of the updates, and the updates that wait."""
        self._finish()
        waiting = {f"late.{name}.{number}": part for name, parts in self._late.items() for number, part in enumerate(parts)}
        return self._updates.state() | waiting

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over a state. A parameter that is not in it had no gradient, or one that was not finite."""
        self._finish()
        self._updates.load(tensors)
        self._late = {name: parts for name, parts in self._nothing().items() if f"late.{name}.0" in tensors}
        for name, parts in self._late.items():
            for number, part in enumerate(parts):
                part.copy_(tensors[f"late.{name}.{number}"])
