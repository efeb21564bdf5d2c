"""The lists of blocks in a model, which may be recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from holotrain.numeric import counted

_PART = re.compile(r"(.+)\[(-?\d*):(-?\d*)\]")
"""A part of a list of blocks, such as layers[1:]."""


def outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are wanted with their names, first to last, without those inside another."""
    within: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in within and wanted(module):
            yield name, module
            within |= {id(part) for part in module.modules()}


def is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of at least two blocks of one class, which have parts of their own."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    kinds = {type(block) for block in module}
    return len(kinds) == 1 and all(any(block.children()) for block in module)


def the_lists(model: nn.Module) -> list[str]:
    """The names of the one list of blocks that a model has, or of all, if all hold blocks of one class.

    Raises:
        ValueError: there is none, or several.
    """
    equal, mixed = (dict(outermost(model, wanted)) for wanted in (is_list_of_blocks, _is_list_of_kinds))
    # The blocks of a list may be of several kinds, and hold small lists themselves, such as adapters.
    found = equal if equal.keys() & mixed.keys() or 2 * _size(equal) >= _size(mixed) else mixed
    if not found or (len(found) > 1 and len({type(block) for module in found.values() for block in module.children()}) > 1):
        several = f"several lists of blocks: {', '.join(found)}; name one" if found else "no list of at least two equal blocks"
        raise ValueError(f"{type(model).__name__} has {several}")
    return list(found)


def _is_list_of_kinds(module: nn.Module) -> bool:
    """Whether a module is a list of blocks, of which some are of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len({type(block) for block in module}) == len(module):
        return False
    return all(any(block.children()) for block in module)


def _size(lists: dict[str, nn.Module]) -> int:
    return sum(parameter.numel() for module in lists.values() for parameter in module.parameters())


def named_blocks(model: nn.Module, blocks: str | Sequence[str] | None) -> list[nn.Module]:
    """The blocks of some lists, each once.

    Args:
        blocks: as :func:`~holotrain.reversible.recompute` takes them.

    Raises:
        ValueError: the model has no such list, or several and none is named.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"recompute takes a model, a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(blocks, nn.Module):
        known = ", ".join(f"{name!r}" for name, part in model.named_modules() if part is blocks) or "such as 'blocks'"
        raise ValueError(f"recompute takes the name of a list of blocks ({known}), not the list itself")
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = [blocks] if isinstance(blocks, str) else blocks or the_lists(model)
    return list({id(block): block for name in lists for block in _blocks_of(name, modules)}.values())


def _blocks_of(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """The blocks of a list, or of a part of one."""
    part = _PART.fullmatch(name)
    whole, *ends = part.groups() if part else (name, "", "")
    found = modules.get(whole)
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        lists = [name for name, part in modules.items() if name and isinstance(part, nn.Sequential | nn.ModuleList)]
        raise ValueError(f"{name!r} is not a list of blocks; the model has {', '.join(lists) or 'none'}")
    blocks = list(found)[slice(*(int(end) if end else None for end in ends))]
    if part and not blocks:
        raise ValueError(f"{name!r} holds none of the {counted(len(found), 'block')} of {whole!r}")
    return blocks
