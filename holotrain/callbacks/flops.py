"""FLOPs of a training step, and peak FLOP/s of devices."""

import copy
import re

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Dense peaks in TFLOP/s, without sparsity, and streaming multiprocessors. Sources: NVIDIA's data sheet of each card; for
# GeForce, the rows with FP32 accumulation (as PyTorch uses it) in the Ada and Blackwell whitepapers. The first match counts;
# "float32" is for matrix products without TF32.
PEAKS: list[tuple[str, dict[str, float]]] = [
    (r"H100 PCIe", {"half": 756, "tf32": 378, "float32": 51, "sms": 114}),
    (r"H100 NVL", {"half": 835, "tf32": 417.5, "float32": 60, "sms": 132}),
    (r"H100|H200", {"half": 989.5, "tf32": 494.7, "float32": 67, "sms": 132}),
    (r"B200", {"half": 2250, "tf32": 1125, "float32": 75, "sms": 148}),
    (r"A100", {"half": 312, "tf32": 156, "float32": 19.5, "sms": 108}),
    (r"L40S", {"half": 362, "tf32": 183, "float32": 91.6, "sms": 142}),
    (r"RTX 4090(?! (?:D|Laptop))", {"half": 165.2, "tf32": 82.6, "float32": 82.6, "sms": 128}),
    (r"RTX 5090(?! (?:D|Laptop))", {"half": 209.5, "tf32": 104.8, "float32": 104.8, "sms": 170}),
]

GPUS = ("A100", "B200", "H100", "H100 NVL", "H100 PCIe", "H200", "L40S", "RTX 4090", "RTX 5090")
"""GPUs in the table, as names for the option ``gpu``."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak of a device in FLOP/s, or None if it is not known.

    Args:
        device_name: from ``torch.cuda.get_device_name()``.
        precision: Lightning's name: ``"bf16-mixed"``, ``"16-mixed"``, ``"32-true"``, ... 32-bit products count as TF32 if
            PyTorch is set to it; 64-bit peaks are not known.
    """
    if precision.startswith(("16", "bf16")):
        kind = "half"
    elif precision.startswith("32"):
        kind = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"
    else:
        return None
    peaks = _peaks_of(device_name)
    return peaks and peaks[kind] * 1e12


def multiprocessors(device_name: str) -> int | None:
    """The number of streaming multiprocessors of a GPU, or None if it is not known."""
    peaks = _peaks_of(device_name)
    return peaks and int(peaks["sms"])


def _peaks_of(device_name: str) -> dict[str, float] | None:
    for pattern, peaks in PEAKS:
        if re.search(rf"\b(?:{pattern})(?![A-Za-z0-9])", device_name):
            return peaks
    return None


def training_flops(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """FLOPs of one forward and backward, including recomputation. A multiply-add counts as two.

    Nothing is computed: a copy of the model runs on the meta device. Counts matrix products, convolutions and attention, as
    ``torch.utils.flop_counter`` does.

    Args:
        model: returns one tensor.
        inputs: of the size to count; values do not matter. If they do not require grad, their gradient is not counted, as in
            training.
    """
    model = copy.deepcopy(model).to("meta")
    inputs = tuple(tensor.to("meta") for tensor in inputs)
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return counter.get_total_flops()
