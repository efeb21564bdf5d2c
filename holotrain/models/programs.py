"""Image models as programs that run without holotrain, by torch.export or as ONNX, for batches of any size.

ViT and Swin can be exported, plain and reversible, also in int8 (loading such a ``.pt2`` needs torchao). Models with ``exact``
cannot: their forward branches on the size of the streams, and a program cannot branch on numbers that it computes.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from holotrain.reversible import ReversibleSequence


def export_program(model: nn.Module, example: Tensor, path: str | Path | None = None) -> ExportedProgram:
    """The model in eval mode as a torch.export program.

    Args:
        model: for images; it is put into eval mode.
        example: images (B, channels, image_size, image_size) with any B, on the model's device.
        path: of a ``.pt2`` file to write as well; ``torch.export.load(path).module()`` runs it.

    Raises:
        ValueError: the model is exact.
    """
    with torch.no_grad():  # a reversible sequence checks whether gradients are enabled
        program = torch.export.export(model.eval(), **_of_any_batch(model, example))
    if path is not None:
        torch.export.save(program, path)
    return program


def export_onnx(model: nn.Module, example: Tensor, path: str | Path) -> None:
    """Writes the model in eval mode as one ONNX file with the input ``images`` and the output ``logits``.

    Args:
        model, example: as in :func:`export_program`.

    Raises:
        ValueError: the model is exact, or onnx or onnxscript is not installed.
    """
    if not (find_spec("onnx") and find_spec("onnxscript")):
        raise ValueError("ONNX needs onnx and onnxscript: pip install 'holotrain[onnx]'")
    names = {"input_names": ["images"], "output_names": ["logits"]}
    with torch.no_grad():
        torch.onnx.export(
            model.eval(), f=path, **_of_any_batch(model, example), **names, dynamo=True, external_data=False, verbose=False
        )


def _of_any_batch(model: nn.Module, example: Tensor) -> dict[str, Any]:
    """Arguments of torch's exporters. The example has at least two samples, because torch treats a batch of one as constant."""
    if any(isinstance(module, ReversibleSequence) and module.grid is not None for module in model.modules()):
        raise ValueError("an exact model cannot be exported as a program: its forward branches on the size of its streams")
    return {"args": (torch.cat((example, example)),), "dynamic_shapes": ({0: Dim("batch")},)}
