"""What an allocator takes for a storage: bytes to bytes."""

CUDA_BLOCK = 512
"""Bytes that PyTorch's caching allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""


def cuda(size: int) -> int:
    """As ``torch.cuda.memory_allocated`` counts it."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK


def cpu(size: int) -> int:
    """As PyTorch's allocator reports it to its profiler: what was asked for."""
    return size


ALLOCATORS = {"cpu": cpu, "cuda": cuda}
