"""Optimizers with two parameter groups, with weight decay and without; Adafactor and Muon for sharded parameters too."""

from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holotrain.models.layers.blocks import ResidualBlock
from holotrain.numeric import require_at_least, require_within
from holotrain.optimizers.low_bit import low_bit
from holotrain.optimizers.stepping import CombinedOptimizer, loss_of, swapped_parameters
from holotrain.reversible import ReversibleBlock
from holotrain.reversible.lists_of_blocks import named_blocks


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns two parameter groups: weight decay applies to weight matrices and kernels, not to norms, biases and positions.

    Frozen parameters are in neither group.

    Raises:
        ValueError: ``weight_decay`` is below 0, which torch does not check in groups.
    """
    require_at_least(0, weight_decay=weight_decay)
    decayed, exempt = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_position = name.endswith("position")
            (exempt if parameter.ndim <= 1 or is_position else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]


def layers_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """The layer of each parameter, as in BEiT (Bao et al., 2021): 0 before the first block, 1 to n in the n blocks, n + 1
    behind the last. What stands between two blocks, such as a merging of patches, is of the layer of the first. Models of timm
    say it themselves.

    Raises:
        ValueError: the model has no list of blocks, or several of different blocks.
    """
    of_timm: Any = next((module for module in model.modules() if hasattr(module, "group_matcher")), None)
    if of_timm is not None:
        grouped = import_module("timm.models").group_parameters(of_timm, of_timm.group_matcher(coarse=False), reverse=True)
        return {parameter: grouped[name] for name, parameter in of_timm.named_parameters()}
    ours: list[nn.Module] = [module for module in model.modules() if isinstance(module, ResidualBlock | ReversibleBlock)]
    blocks = ours or named_blocks(model, None)
    inside = {parameter: number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    layers, layer = {}, 0
    for parameter in model.parameters():
        behind = len(blocks) + 1 if layer == len(blocks) else layer
        layers[parameter] = inside.get(parameter, behind)
        layer = max(layer, inside.get(parameter, 0))
    return layers


def decay_layers(optimizer: Optimizer, model: nn.Module, layer_decay: float = 1.0) -> None:
    """Divides the groups of a new optimizer by layers, in place, the last layer first: a layer learns with ``layer_decay``
    times the rate of the next one. A factor ``lr_scale`` of a group, such as timm's groups have, becomes part of its rate.

    Raises:
        ValueError: ``layer_decay`` is out of range, or the model has no list of blocks.
    """
    require_within(0, 1, closed=True, layer_decay=layer_decay)
    layers = layers_of(model) if layer_decay != 1 else {}
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        divided: dict[tuple[int, int], dict[str, Any]] = {}
        for number, group in enumerate(part.param_groups):
            rate = group["lr"] * group.pop("lr_scale", 1.0)
            for parameter in group["params"]:
                below = max(layers.values(), default=0) - layers.get(parameter, 0)
                of_layer = {**group, "params": [], "lr": rate * layer_decay**below}
                divided.setdefault((below, number), of_layer)["params"].append(parameter)
        part.param_groups[:] = [divided[key] for key in sorted(divided)]
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._share()


def adamw(
    model: nn.Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.05
) -> AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with the groups of :func:`decay_groups`, on a GPU in one kernel.

    Args:
        lr: peak learning rate
        betas: decay rates of the running averages of the gradient and its square
        eps: term added to the denominator
        weight_decay: weight decay of matrices and kernels; norms, biases and position embeddings have none
    """
    groups = decay_groups(model, weight_decay)
    weights = [weight for group in groups for weight in group["params"]]
    fused = bool(weights) and all(weight.is_cuda and not is_traceable_wrapper_subclass(weight) for weight in weights)
    optimizer = AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=fused or None)
    if fused:  # else it would unscale gradients of fp16 itself, and Lightning clips none of an optimizer that does
        optimizer._step_supports_amp_scaling = False
    return optimizer


def adafactor(
    model: nn.Module,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Adafactor:
    """torch's Adafactor (Shazeer and Stern, 2018): of a matrix it keeps one number a row and one a column, and no momentum.

    Args:
        lr: peak learning rate, as a share of a parameter's root mean square, and at most 1 / sqrt(step)
        beta2_decay: the squares of gradients are averaged with the decay rate 1 - step ** beta2_decay
        eps: added to squares (null: the smallest difference of the dtype), and the least root mean square of a parameter
        d: the largest root mean square of an update before lr
        weight_decay: weight decay of matrices and kernels; norms, biases and position embeddings have none
    """
    groups = decay_groups(model, weight_decay)
    return ShardedAdafactor(groups, lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), d=d)


def adamw_low_bit(
    model: nn.Module,
    bits: Literal["8bit", "4bit", "fp8"] = "8bit",
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.05,
) -> Optimizer:
    """AdamW with averages in 8 bits (Dettmers et al., 2022), 4 bits (Li et al., 2023) or FP8 (E4M3), of torchao.

    Args:
        bits: of each entry of the two averages; fp8 is E4M3
        lr: peak learning rate
        betas: decay rates of the running averages of the gradient and its square
        eps: term added to the denominator
        weight_decay: weight decay of matrices and kernels; norms, biases and position embeddings have none
    """
    return low_bit(f"AdamW{bits.capitalize()}", decay_groups(model, weight_decay), lr=lr, betas=tuple(betas), eps=eps)


def muon(
    model: nn.Module,
    lr: float = 1.6e-2,
    others: float = 0.5,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> CombinedOptimizer:
    """Muon (Jordan et al., 2024) for the Linear layers of the blocks, AdamW for embeddings, heads, norms and biases.

    Muon orthogonalises the momentum of each matrix. Its updates are scaled to the size of AdamW's (Liu et al., "Muon is
    Scalable for LLM Training", 2025), so that both use learning rates of the same order.

    Args:
        lr: peak learning rate of Muon
        others: AdamW's learning rate divided by lr; AdamW updates all but the weight matrices in blocks
        momentum: momentum factor of Muon
        betas: decay rates of AdamW's running averages
        eps: term added to AdamW's denominator
        weight_decay: weight decay of matrices and kernels; norms, biases and position embeddings have none

    Raises:
        ValueError: a value out of range.
    """
    require_at_least(0, lr=lr, others=others)
    require_within(0, 1, momentum=momentum)
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock | ReversibleBlock)]
    inner = {id(layer.weight) for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)}
    decayed, exempt = decay_groups(model, weight_decay)
    matrices = [parameter for parameter in decayed["params"] if id(parameter) in inner]
    decayed["params"] = [parameter for parameter in decayed["params"] if id(parameter) not in inner]
    parts: list[Optimizer] = [AdamW([decayed, exempt], lr=others * lr, betas=tuple(betas), eps=eps)]
    if matrices:
        parts.append(ShardedMuon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    return CombinedOptimizer(parts)


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 1e-4) -> SGD:
    """Stochastic gradient descent with the groups of :func:`decay_groups`.

    Args:
        lr: peak learning rate
        momentum: momentum factor
        nesterov: use Nesterov momentum
        weight_decay: weight decay of matrices and kernels; norms, biases and position embeddings have none
    """
    return SGD(decay_groups(model, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)


class _EachWhole(Optimizer):
    """Steps each sharded parameter with ``_step_whole``, and all the others as the next class does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # ty: ignore[incompatible-method-override]
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_whole(parameter, parameter.grad, group)
        unsharded = [(group, {p: p for p in group["params"] if not isinstance(p, DTensor)}) for group in self.param_groups]
        with swapped_parameters(self, unsharded):
            super().step()
        return loss

    @abstractmethod
    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None: ...


class ShardedAdafactor(_EachWhole, Adafactor):
    """torch's Adafactor, which also steps sharded parameters (FSDP2, tensor parallel), each as a whole.

    Its update depends on means over rows and columns and on norms of the whole parameter, which torch (2.15) cannot compute in
    place on shards. Here every process gathers one parameter and its gradient at a time and computes what a single process
    would. Its state is small and stays whole.
    """

    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None:
        whole = parameter.full_tensor()
        whole.grad = grad.full_tensor()
        with swapped_parameters(self, [(group, {parameter: whole})]):
            Adafactor.step(self)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


class ShardedMuon(_EachWhole, Muon):
    """torch's Muon, which also orthogonalises sharded matrices (FSDP2, tensor parallel) as a whole.

    On shards, each of its ten matrix products would be a collective in half precision, and the result would depend on how many
    there are. Here every process gathers an update once and computes what a single process would. Momentum stays sharded.
    """

    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrix = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        matrix.grad = update.full_tensor()  # ty: ignore[missing-union-attribute]
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        Muon([matrix], weight_decay=0, momentum=0, nesterov=False, **options).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        own = distribute_tensor(matrix.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.add_(own)
