"""Arguments that a class takes as ``**options`` and passes on, in ``help`` and in ``inspect.signature``."""

import re
from collections.abc import Iterable
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any


def show_arguments(cls: Any, chain: Iterable[type] | None = None, last: type | None = None) -> None:
    """Gives a class the signature of all arguments that it takes, and its docstring their descriptions, which each class of
    the chain has for its own alone. Does nothing if the last class of the chain takes any keyword.

    Args:
        chain: the class and those that it passes its options on to, in order; None: it and its base classes.
        last: the class of the chain whose keywords are shown after those of the others.
    """
    makers: list[type] = []
    for each in chain or cls.__mro__:
        if "__init__" in vars(each):
            makers.append(each)
            if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in _own(each)):
                break
    else:
        if makers[0] is cls:
            cls.__signature__ = None  # not that of a base class
        return
    found: dict[str, tuple[type, Parameter]] = {}
    for maker in makers:
        for parameter in _own(maker):
            if parameter.kind is not Parameter.VAR_KEYWORD:
                passed_on = parameter if maker is makers[0] else parameter.replace(kind=Parameter.KEYWORD_ONLY)
                found.setdefault(parameter.name, (maker, passed_on))
    shown = sorted(found.items(), key=lambda item: (item[1][1].kind, item[1][0] is last))
    cls.__signature__ = Signature([parameter for _, (_, parameter) in shown])
    if cls.__doc__ and makers != [cls]:  # python -OO has none
        described = {maker: _descriptions(maker) for maker in makers}
        lines = [described[maker][name] for name, (maker, _) in shown if name in described[maker]]
        cls.__doc__ = _with_arguments(cleandoc(cls.__doc__), "".join(dict.fromkeys(lines)))


def _own(cls: type) -> list[Parameter]:
    """The parameters of the class's own ``__init__``, without ``self``."""
    return list(signature(vars(cls)["__init__"]).parameters.values())[1:]


SECTION = re.compile(r"^Args:\n((?: {4}.*\n?)+)", re.MULTILINE)


def _descriptions(cls: type) -> dict[str, str]:
    """The lines below ``Args:``, by the name of each argument."""
    section = SECTION.search(cleandoc(cls.__doc__ or ""))
    items = re.split(r"\n(?= {4}\w)", section[1].rstrip()) if section else []
    return {name: f"{item}\n" for item in items for name in item.partition(":")[0].strip().split(", ")}


def _with_arguments(text: str, lines: str) -> str:
    if SECTION.search(text):
        return SECTION.sub(lambda _: f"Args:\n{lines}", text, count=1)
    before, *after = re.split(r"^(?=Shapes:|Attributes:|Raises:)", text, maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join([before.rstrip(), f"Args:\n{lines}".rstrip(), *after])
