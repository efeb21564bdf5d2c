"""Image models as programs that run without holotrain: torch.export's, and ONNX. Their batch may be of any size.

ViT and Swin export, plain and reversible, whose blocks then simply run; in int8 too, but reading their ``.pt2`` takes torchao.
Sequences with ``exact`` do not: their forward reads how large the streams become, and a program cannot branch on numbers that
it computes.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from holotrain.reversible import ReversibleSequence


def export_program(model: nn.Module, example: Tensor, path: str | Path | None = None) -> ExportedProgram:
    """The model in eval mode as a program of torch's.

    Args:
        model: of images; it is put in eval mode.
        example: images (B, channels, image_size, image_size) of any B, where the model is.
        path: of a ``.pt2`` file to write as well; ``torch.export.load(path).module()`` runs it.

    Raises:
        ValueError: the model is exact.
    """
    with torch.no_grad():  # a reversible sequence asks whether gradients are wanted
        program = torch.export.export(model.eval(), **_of_any_batch(model, example))
    if path is not None:
        torch.export.save(program, path)
    return program


def export_onnx(model: nn.Module, example: Tensor, path: str | Path) -> None:
    """Writes the model in eval mode as ONNX, in one file: ``images`` in, ``logits`` out.

    Args:
        model, example: as for :func:`export_program`.

    Raises:
        ValueError: the model is exact; onnx or onnxscript are not installed.
    """
    if not (find_spec("onnx") and find_spec("onnxscript")):
        raise ValueError("ONNX needs onnx and onnxscript: pip install 'holotrain[onnx]'")
    names = {"input_names": ["images"], "output_names": ["logits"]}
    with torch.no_grad():
        torch.onnx.export(
            model.eval(), f=path, **_of_any_batch(model, example), **names, dynamo=True, external_data=False, verbose=False
        )


def _of_any_batch(model: nn.Module, example: Tensor) -> dict[str, Any]:
    """What torch exports, with two examples at least: it takes a batch of one for fixed."""
    if any(isinstance(module, ReversibleSequence) and module.grid is not None for module in model.modules()):
        raise ValueError("an exact model does not export as a program: it reads how large its streams become")
    return {"args": (torch.cat((example, example)),), "dynamic_shapes": ({0: Dim("batch")},)}
