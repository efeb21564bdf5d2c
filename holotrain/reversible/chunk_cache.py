"""Keys and values of chunks as a cache of transformers. Imported only with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from holotrain.reversible.chunk_keys import ChunkedKeys, ChunkLayer


class _Layer(DynamicLayer):
    def __init__(self, keys: ChunkLayer) -> None:
        super().__init__()
        self._keys, self.is_sliding, self.is_initialized = keys, keys.window is not None, True

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        return self._keys.update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._keys.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._keys.first()
        return self._keys.start + query_length - first, first


class ChunkCache(Cache):
    """The cache of a model's call.

    Args:
        config: of the model, whose layers may have sliding windows.
        length: tokens.
        on_host: keys and values are in main memory.

    Attributes:
        chunks: the keys and values.
    """

    runs_again = True

    def __init__(self, config: Any, length: int, on_host: bool) -> None:
        windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        windows += [None] * (config.num_hidden_layers - len(windows))
        self.chunks = ChunkedKeys(windows, length, on_host)
        super().__init__(layers=[_Layer(each) for each in self.chunks.layers])
