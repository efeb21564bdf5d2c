"""The memory that a device's allocator takes for storages, and what operations hold inside themselves.

``scratch`` is an upper bound, from shapes alone, of what one operation on a CPU may hold in addition to its tensors. PyTorch
gives a matrix product in half precision to oneDNN if the CPU has instructions for it. oneDNN copies operands into the layout
that its kernels read: on CPUs with AMX the whole weight, on all of them blocks for each thread. It takes this memory from
PyTorch's allocator. How much depends on the CPU, on the number of threads and on oneDNN's heuristics, so a plan has an upper
bound of it. The bound follows what oneDNN may book (``init_aux_values`` and ``init_scratchpad`` in
src/cpu/x64/matmul/brgemm_matmul_utils.cpp) and what PyTorch reorders before (``matmul_forward`` in ideep). Convolutions and
fused attention have scratch in every precision and on every CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)

BLOCK = 64
"""Rows or columns of the largest block of a half precision product. Sizes are rounded up to whole blocks."""

CHANNELS = 16
"""Channels of a convolution are rounded up to a multiple of it, unless there are no more than :data:`COLOURS`."""

COLOURS = 4

PER_THREAD = 64 * 1024
"""Bytes for the tiles of each thread and for alignment; oneDNN needs about 10 KiB."""

ROWS, COLUMNS = 256, 512
"""The largest block of queries and of keys in fused attention (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""

FUSED_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
FUSED_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1, aten.addmm_.default: 1}
"""Matrix products, and which argument is the first factor."""


def goes_to_onednn(dtype: torch.dtype) -> bool:
    """Whether PyTorch gives products of ``dtype`` to oneDNN on this machine. PyTorch itself makes this check before a product.

    The answer is yes for more CPUs than those with AMX: oneDNN packs operands on the others too, in smaller pieces.
    """
    if dtype not in HALF or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    mkldnn = torch.ops.mkldnn
    return mkldnn._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported()


def scratch(function: OpOverload, args: tuple) -> int:
    """Bytes that an operation may hold within itself on this machine's CPU, at most; 0 where nothing is known of it."""
    if function in PRODUCTS:
        first = PRODUCTS[function]
        return _product(args[first], args[first + 1])
    if function is aten.convolution.default:
        image, weight, _, stride, padding, dilation = args[:6]
        return _convolution(image, weight, stride, padding, dilation)
    if function is aten.convolution_backward.default:
        _, image, weight, _, stride, padding, dilation = args[:7]
        return _convolution(image, weight, stride, padding, dilation, backward=True)
    if function is FUSED_ATTENTION:
        return _attention(*args[:3])
    if function is FUSED_ATTENTION_BACKWARD:
        return _attention(*args[1:4], backward=True)
    return 0


def _product(a: Tensor, b: Tensor) -> int:
    """(..., m, k) by (..., k, n): the reordered weight, copies of operands that are not contiguous, and buffers of each thread.

    Either factor may be oneDNN's weight. A thread may book a block of each factor and one of the result in fp32. No block is
    larger than the whole matrix. If the threads divide k, each one books a whole result.
    """
    if not goes_to_onednn(a.dtype):
        return 0
    batch = math.prod(a.shape[:-2])
    m, n = _up(a.shape[-2], BLOCK) + BLOCK, _up(b.shape[-1], BLOCK) + BLOCK
    k = a.shape[-1] + a.shape[-1] // 8 + BLOCK  # rows of a power of two get some more
    left, right, result = m * k * a.itemsize, k * n * a.itemsize, m * n * 4
    # oneDNN reads a matrix in place if it is contiguous or transposed.
    apart = sum(factor.nbytes for factor in (a, b) if not (factor.is_contiguous() or factor.mT.is_contiguous()))
    each = left + right + result + PER_THREAD
    return batch * max(left, right) + apart + torch.get_num_threads() * each


def _convolution(
    image: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], backward: bool = False
) -> int:
    """Images, results and weights in a blocked layout, and for each thread one image, one result and the weights in fp32.

    This also bounds PyTorch's own convolution, which copies the patches of all images (im2col).
    """
    places = math.prod(
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    kernel, item = math.prod(weight.shape[2:]), image.itemsize
    channels, of_group = image.shape[1], weight.shape[1]
    depthwise = of_group == 1 < channels
    padded = math.prod(size + 2 * pad for size, pad in zip(image.shape[2:], padding, strict=True))
    few = channels <= COLOURS  # oneDNN reads these in place
    images = max((channels if few else _up(channels, CHANNELS)) * padded, of_group * kernel * places) * item
    results = _up(weight.shape[0], CHANNELS) * places * item
    weights = _up(weight.shape[0], CHANNELS) * (1 if depthwise else _up(of_group, CHANNELS)) * kernel
    each = images + 2 * results + 4 * weights + PER_THREAD
    whole = image.shape[0] * (images + results) + weights * item
    # The gradient of grouped weights has whole blocks of channels for each group.
    groups = channels // of_group if backward else 1
    blocks = groups * _up(weight.shape[0] // groups, CHANNELS) * _up(of_group, CHANNELS) * kernel * item if groups > 1 else 0
    return (2 if backward else 1) * whole + blocks + torch.get_num_threads() * each


def _attention(query: Tensor, key: Tensor, value: Tensor, backward: bool = False) -> int:
    """(batch, heads, rows, width) each: a block of attention weights for each thread, and in half precision packed operands.

    The backward also holds the gradients of these weights, and packs operands in two layouts.
    """
    half = query.dtype in HALF
    exact = 4 if half else query.itemsize
    rows, columns, width = min(query.shape[-2], ROWS), _up(min(key.shape[-2], COLUMNS), BLOCK), _up(query.shape[-1], BLOCK)
    block = rows * columns * (exact + (query.itemsize if half else 0))
    each = (2 if backward else 1) * (block + rows * width * exact) + 2 * rows * exact
    packed = 0
    if goes_to_onednn(query.dtype):
        operands = (query, query, key, key, value, query, query) if backward else (key, value)
        packed = sum(
            operand.itemsize * math.prod(operand.shape[:-2]) * (_up(operand.shape[-2], BLOCK) + BLOCK) * width
            for operand in operands
        )
    return packed + torch.get_num_threads() * each


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cuda_scratch(function: OpOverload, args: tuple) -> int:
    """The fp32 gradient of the queries in the backward of flash attention, whose rows and width are rounded up, and a sum for
    each row (mha_bwd of PyTorch's flash_api.cpp). Attention in fp32 has no such copy."""
    if function is not FUSED_ATTENTION_BACKWARD or args[1].dtype not in HALF:
        return 0
    query = args[1]
    rows = math.prod(query.shape[:-2]) * _up(query.shape[-2], 128)
    return 4 * rows * (_up(query.shape[-1], 32) + 1)


CUDA_WORKSPACES = 3 * 32 * 2**20
"""Bytes that cuBLAS holds on a GPU of the Hopper generation: 32 MiB for each thread and stream, which are those of the forward
and of the backward, and the second stream of ``pareprop``. Earlier GPUs have 8 MiB each."""

CUDA_BLOCK = 512
"""Bytes that PyTorch's caching allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""

MIXING = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")}
"""Operations that need operands of one dtype on a CPU: an operand of another dtype is copied first (TensorIterator)."""

MEANS = {torch.ops.aten.mean.default, torch.ops.aten.mean.dim}


@dataclass(frozen=True)
class Allocator:
    """
    Args:
        rounded: maps the bytes of a storage to the bytes that are allocated for it.
        copies_operands: whether arithmetic on two dtypes copies an operand, and a mean in half precision its input, in fp32.
        scratch: upper bound of the bytes that an operation may allocate in addition, given its arguments.
        workspaces: bytes that libraries hold all the time.
    """

    rounded: Callable[[int], int] = int
    copies_operands: bool = True
    scratch: Callable[[OpOverload, tuple], int] = scratch
    workspaces: int = 0

    def within(self, function: OpOverload, args: tuple, result: object) -> int:
        """Bytes that an operation allocates and frees before it returns. Small temporaries are left out."""
        if function is torch.ops.aten.logsumexp.default:
            return self.rounded(args[0].nbytes)  # the exponentials before the sum
        if function is torch.ops.aten._safe_softmax.default:
            return self.rounded(args[0].numel())  # the mask
        if self.copies_operands and function in MEANS and args[0].dtype in HALF and isinstance(result, Tensor):
            return self.rounded(4 * args[0].numel()) + self.rounded(4 * result.numel())  # the copy, and the mean in fp32
        if self.copies_operands and function in MIXING and isinstance(result, Tensor):
            operands = (arg for arg in args if isinstance(arg, Tensor) and arg.ndim and arg.dtype != result.dtype)
            return sum(self.rounded(operand.numel() * result.element_size()) for operand in operands)
        return 0


ALLOCATORS = {
    "cpu": Allocator(),
    "cuda": Allocator(
        lambda size: -(-size // CUDA_BLOCK) * CUDA_BLOCK, False, scratch=_cuda_scratch, workspaces=CUDA_WORKSPACES
    ),
}
"""By device type. They count as ``torch.cuda.memory_allocated`` does, and as the CPU allocator reports to the profiler."""
