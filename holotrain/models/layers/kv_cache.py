"""Keys and values of the tokens that a causal model has read, so that only the new token has to be computed."""

import torch
from torch import Tensor


class KVCache:
    """Buffers for the keys and values of every layer, allocated once and written in place.

    Sequences of a batch may differ in length: a token is written to the slot of its own position, and a query sees the slots up
    to its position. Entries for the padding of a prompt are overwritten before any query sees them. Attention needs no mask,
    and so has its fastest kernel, while prompts are read, and for single tokens that all have the same position.

    Args:
        layers, batch, heads, length, width: L, B, H, S (slots: tokens of prompt and answer together), D.
        device, dtype: of the buffers; those of the keys.

    Attributes:
        keys, values: (L, B, H, S, D).
        end: upper bound of the slots that a query may see; attention reads no further. ``static`` keeps it at S, for compiled
            code and graphs, which need constant shapes.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        length: int,
        width: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        static: bool = False,
    ) -> None:
        shape = (layers, batch, heads, length, width)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.static = static
        self.end = length if static else 0
        self._following = False
        self._rows = torch.arange(batch, device=device)[:, None]

    @property
    def length(self) -> int:
        return self.keys.shape[3]

    def seen_from(self, positions: Tensor, end: int) -> Tensor | None:
        """Makes the first ``end`` slots readable and returns which of them each query sees, (B, 1, T, slots).

        Args:
            positions: (B, T), of the next tokens, or (1, T) if they are the same for all sequences.
            end: one more than the largest position.

        Returns:
            None where no mask is needed: each query sees all slots, or, where there are as many queries as slots, those up to
            its own.

        Raises:
            ValueError: there are fewer slots.
        """
        if end > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens, not for {end}")
        self.positions = positions
        self.end = self.length if self.static else end
        rows, tokens = positions.shape
        self._following = not self.static and (tokens == end or (tokens == 1 and rows == 1))
        if self._following:
            return None
        slots = torch.arange(self.end, device=positions.device)
        return (slots <= positions[..., None]).unsqueeze(1)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of new tokens, (B, H, T, D), and returns those of all readable slots, (B, H, slots, D)."""
        kept = []
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if self._following:
                buffer[:, :, self.end - new.shape[2] : self.end] = new
            else:
                buffer[self._rows, :, self.positions] = new.transpose(1, 2).to(buffer.dtype)
            kept.append(buffer[:, :, : self.end])
        return kept[0], kept[1]
