"""HolographicSynthesis: rewrites gradients between the backward and the optimizer's step."""

from __future__ import annotations

import warnings
from dataclasses import fields
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from holotrain.numeric import counted
from holotrain.synthesis.delayed import Delayed
from holotrain.synthesis.keys import Covers, Keys, Layer, layers_of, local, pairs, shares_of, working_dtype
from holotrain.synthesis.options import SynthesisOptions
from holotrain.synthesis.updates import Updates
from holotrain.targets import show_arguments

EACH = "of_each_process"
"""Key of tensors in a state that differ between processes; in a checkpoint it has a list, with those of each process."""

WARNED_COUNTS = {1, 2, 5, *(10**power for power in range(1, 10))}
"""Counts of skipped steps at which a warning is issued."""


class HolographicSynthesis:
    """Replaces gradients by updates that are synthesised from them and from the inputs of each layer.

        synthesis = HolographicSynthesis(model, mode="associative")
        loss.backward(); synthesis.step(); optimizer.step()

    ``associative`` has a memory like momentum: use an optimizer without momentum (SGD), at about the learning rate that
    momentum would have. ``bind`` is the published algorithm; its update is not a descent direction (its cosine to the gradient
    is 0 +- 1/sqrt(n)) unless ``mix`` or ``cosine_floor`` make it one.

    Args:
        model: already on its device; forward hooks on its layers gather the keys in training mode.
        mode: ``"associative"``, ``"shared"`` or ``"bind"``.
        covers: whether to cover a parameter, given its name and the parameter; None: all that require grad.
        options: those of :class:`~holotrain.synthesis.options.SynthesisOptions`.

    Attributes:
        steps: number of synthesised steps; skipped: number of steps skipped because a gradient held NaN or infinity.
        measuring: whether a step also measures; measured: then a tensor (cosine of the update and the gradient, norm of the
            update) of the last step, over the covered entries, on the model's device; else None.

    In distributed training the gradients must already be reduced (DDP and FSDP2 do so in the backward). The keys are reduced
    here, so all processes hold the same holograms. Under FSDP2 each process holds those of its own rows of the
    parameters: the entries of a block, and the blocks that share a hologram, are then others than in one process.

    Raises:
        ValueError: options out of range, parameters that cannot be covered.
    """

    def __init__(self, model: nn.Module, mode: str = "associative", *, covers: Covers | None = None, **options: Any) -> None:
        self.options = SynthesisOptions(mode=mode, **options)
        layers = layers_of(model, covers)
        if mode == "bind":
            if shares_of(layers) > 1:
                raise ValueError("mode='bind' needs the whole gradient, and FSDP2 shards it; use 'shared' or 'associative'")
            layers = [Layer(model, dict(pairs(layers)))]
        self.parameters = [parameter for _, parameter in pairs(layers)]
        self.steps = 0
        self.skipped = 0
        self.measuring = False
        self.measured: Tensor | None = None
        self._processes = shares_of(layers)
        self._named = dict(model.named_parameters())
        self._shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in pairs(layers)]
        like = torch.empty(0, dtype=working_dtype(layers), device=self.parameters[0].device)
        self._updates = (Delayed if self.options.split == "cpu" else Updates)(layers, self.options, like)
        outputs = self.options.representation if mode == "bind" else None
        self._keys = Keys(model, layers, self._updates.key_length, like, outputs)

    @property
    def state_tensors(self) -> list[Tensor]:
        """The tensors kept between steps: holograms, running means, and updates that wait.

        A step also needs temporary memory: a few MiB on a CPU; as much as the gradients on a GPU, and where updates change
        layer by layer (``match_norm``, ``mix``, ``cosine_floor``).
        """
        return list(self._updates.state().values())

    def _begins_with(self) -> str | None:
        """What the first step warns of."""
        if not any(self._keys.seen):
            return "no layer was called in training mode since the synthesis was created, so gradients are bound without a key"
        if self.options.mode == "bind" and not self.options.mix and self.options.cosine_floor is None:
            return "bind as published is not a descent direction and does not train; use mix or cosine_floor"
        return None

    def step(self) -> bool:
        """Rewrites the gradients of the covered parameters. Call it between ``backward()`` and ``optimizer.step()``.

        Returns whether it did. If any gradient of the model holds NaN or infinity, the holograms do not change and all
        gradients of the model are set to None, so that the optimizer skips the step too (with a split on a GPU the next step,
        which would apply the update). Such steps are counted and reported by a warning.

        Raises:
            RuntimeError: no covered parameter has a gradient, or ``bind`` has no output of the model.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            raise RuntimeError("no gradient to synthesise from; call step() after backward() and before zero_grad()")
        if self.options.mode == "bind" and not self._keys.seen[0]:
            raise RuntimeError(
                "bind uses the model's output as its key, but the model was not called in training mode: pass the module "
                'whose forward makes the predictions (SynthesisCallback: module="its name")'
            )
        if self.steps == 0 and (said := self._begins_with()):
            warnings.warn(said, stacklevel=2)
        for name, parameter in self._named.items():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise RuntimeError(f"the gradient of {name} is sparse; synthesis needs dense gradients (sparse=False)")
        for parameter in self.parameters:
            if parameter.grad is not None and not local(parameter.grad).is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        grads = [local(parameter.grad) for parameter in self._named.values() if parameter.grad is not None]
        with record_function("synthesis"), torch.no_grad():
            finite, measured = self._updates.step(grads, self._keys.take(), self.steps, self.measuring)
        if not finite():
            self.skipped += 1
            for parameter in self._named.values():
                parameter.grad = None
            if self.skipped in WARNED_COUNTS:
                warnings.warn(
                    f"gradients hold NaN or infinity after {counted(self.steps, 'step')}: the step is skipped "
                    f"({self.skipped} so far)",
                    stacklevel=2,
                )
            self.measured = None
            return False
        self.steps += 1
        self.measured = measured
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors: holograms, running means, counts, and a description of the covered parameters.

        Where FSDP2 shards parameters, the tensors are those of this process, under :data:`EACH`.
        """
        tensors = {name: tensor.detach().clone() for name, tensor in self._updates.state().items()}
        return {
            "geometry": self._geometry(),
            "steps": self.steps,
            "skipped": self.skipped,
            EACH if self._processes > 1 else "tensors": tensors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state.

        Raises:
            ValueError: the state belongs to other parameters, to other options, or to another number of processes under FSDP2;
                or its tensors or counts are not valid.
        """
        if not isinstance(state.get("geometry"), dict):
            raise ValueError("this is not the state of a HolographicSynthesis")
        missing = {each.name: each.default for each in fields(SynthesisOptions)} | {"processes": 1, "key_ema": False}
        for name, value in self._geometry().items():
            other = state["geometry"].get(name, missing.get(name))
            if other != value:
                saved, expected = (shorten(repr(each), 80) for each in (other, value))
                raise ValueError(f"the state belongs to another synthesis: {name} is {saved} there, not {expected}")
        counts = [state.get(name) for name in ("steps", "skipped")]
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"the state is damaged: it has made {counts[0]} steps and skipped {counts[1]}")
        try:
            tensors = state["tensors"] if self._processes == 1 else state[EACH]
            self._updates.load(tensors[dist.get_rank()] if isinstance(tensors, list) else tensors)
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(f"the state is damaged: its tensors are others ({error!s:.100})") from error
        self.steps, self.skipped = state["steps"], state["skipped"]

    def remove(self) -> None:
        """Removes the hooks from the model and frees the holograms. The model is then as before."""
        self._keys.remove()
        vars(self).pop("_updates", None)
        self.parameters = []

    def _geometry(self) -> dict[str, Any]:
        options = self.options
        chosen = ("mode", "transform", "subsample", "dtype", "seed", "representation", "split")
        return {name: getattr(options, name) for name in chosen} | {
            "block_length": options.entries_a_block,
            "superpose": options.slots,
            "ema": options.ema > 0,
            "key_ema": bool(options.key_ema),
            "parameters": self._shapes,
            "processes": self._processes,
        }


show_arguments(HolographicSynthesis, (HolographicSynthesis, SynthesisOptions))
