"""Memory for the sum of spectra over steps, in full or half precision, on the device or on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_RANGE = 1024.0
"""Each row is scaled to this largest magnitude in fp16, which leaves headroom."""


class Hologram:
    """Rows of spectra, initially zero.

    Args:
        rows, bins: the shape.
        dtype: of the spectra, real or complex.
        half: ``torch.bfloat16`` or ``torch.float16``: the dtype in which their parts are stored; None: ``dtype``.
        device: the device that computes.
    """

    def __init__(self, rows: int, bins: int, dtype: torch.dtype, half: torch.dtype | None, device: torch.device) -> None:
        self.dtype = dtype
        self.memory = self._allocate(rows, bins, half, device)
        scaled = half is torch.float16
        self.scales = torch.ones(rows, *(1,) * (self.memory.ndim - 1), device=self.memory.device) if scaled else None

    def _allocate(self, rows: int, bins: int, half: torch.dtype | None, device: torch.device) -> Tensor:
        if half is None:
            return torch.zeros(rows, bins, dtype=self.dtype, device=device)
        parts = (2,) if self.dtype.is_complex else ()
        return torch.zeros(rows, bins, *parts, dtype=half, device=device)

    def load(self, part: slice) -> Tensor:
        """Returns rows to change in place and pass to :meth:`keep`."""
        return self._widened(self.memory[part], None if self.scales is None else self.scales[part])

    def keep(self, part: slice, rows: Tensor) -> None:
        """Stores rows that :meth:`load` returned."""
        if self.memory.dtype == self.dtype:
            return  # load returned the memory itself
        memory, scales = self._narrowed(rows)
        self.memory[part] = memory
        if scales is not None:
            self.scales[part] = scales

    def _widened(self, memory: Tensor, scales: Tensor | None) -> Tensor:
        if memory.dtype == self.dtype:
            return memory
        wide = memory.to(self.dtype.to_real())
        wide = wide if scales is None else wide * scales
        return torch.view_as_complex(wide) if self.dtype.is_complex else wide

    def _narrowed(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        parts = torch.view_as_real(rows) if rows.is_complex() else rows
        if self.scales is None:
            return parts.to(self.memory.dtype), None
        largest = parts.abs().amax(tuple(range(1, parts.ndim)), keepdim=True).float()
        scales = (largest / HALF_RANGE).clamp_min(torch.finfo(torch.float32).tiny)  # smaller values become zero
        return (parts / scales).to(self.memory.dtype), scales

    def prefetch(self, part: slice) -> None:
        """Starts to copy rows that are needed next to the device, if they are stored elsewhere."""

    def wait(self) -> None:
        """Waits until all rows are stored, so that the host can read them."""

    @property
    def state(self) -> dict[str, Tensor]:
        """The stored tensors."""
        return {"memory": self.memory} | ({} if self.scales is None else {"scales": self.scales})


class OffloadedHologram(Hologram):
    """A hologram in pinned memory of the host. Rows are copied to and from a CUDA device on a separate stream.

    Rows that were prefetched arrive while others are computed, and changed rows are copied back while the next ones are
    computed. The host does not wait.
    """

    def __init__(self, rows: int, bins: int, dtype: torch.dtype, half: torch.dtype | None, device: torch.device) -> None:
        super().__init__(rows, bins, dtype, half, torch.device("cpu"))
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._arriving: dict[int, tuple[list[Tensor], torch.cuda.Event]] = {}
        self.memory = self.memory.pin_memory()
        self.scales = None if self.scales is None else self.scales.pin_memory()

    def prefetch(self, part: slice) -> None:
        with torch.cuda.stream(self._copies):
            rows = [tensor[part].to(self._device, non_blocking=True) for tensor in self.state.values()]
            self._arriving[part.start] = rows, self._copies.record_event()

    def load(self, part: slice) -> Tensor:
        if part.start not in self._arriving:
            self.prefetch(part)
        current = torch.cuda.current_stream(self._device)
        arrived, event = self._arriving.pop(part.start)
        current.wait_event(event)
        for tensor in arrived:
            tensor.record_stream(current)
        return self._widened(arrived[0], arrived[1] if len(arrived) > 1 else None)

    def keep(self, part: slice, rows: Tensor) -> None:
        changed = (rows, None) if self.memory.dtype == self.dtype else self._narrowed(rows)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            for kept, new in zip(self.state.values(), changed, strict=False):
                kept[part].copy_(new, non_blocking=True)
                new.record_stream(self._copies)

    def wait(self) -> None:
        self._copies.synchronize()
