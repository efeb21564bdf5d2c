"""Arguments that a class takes as ``**options`` and passes on, in ``help`` and in ``inspect.signature``."""

import re
from collections.abc import Iterable
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any

from holotrain.targets import is_of


class ShowsInherited:
    """Its subclasses show the arguments of their base classes too. Those of users keep their own signature."""

    def __init_subclass__(cls: Any, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.__signature__ = None  # not that of a base class
        if is_of(cls.__module__, ["holotrain"]):
            show_arguments(cls)


def show_arguments(cls: Any, chain: Iterable[type] | None = None, last: type | None = None) -> None:
    """Shows in the signature and the docstring of a class the arguments that it passes on. Each class describes only its own.

    If the last class of the chain takes any arguments, the class keeps its own signature.

    Args:
        chain: the class and those that it passes its options on to, in order; None: it and its base classes.
        last: the class of the chain whose keywords are shown after those of the others.
    """
    makers: list[type] = []
    found: dict[str, tuple[type, Parameter]] = {}
    for each in chain or cls.__mro__:
        if "__init__" not in vars(each):
            continue
        makers.append(each)
        try:
            parameters = list(signature(vars(each)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):  # of a descriptor, or of C
            return
        kinds = {parameter.kind for parameter in parameters}
        if Parameter.VAR_POSITIONAL in kinds:
            return
        for parameter in parameters:
            if parameter.kind is not Parameter.VAR_KEYWORD:
                passed_on = parameter if each is makers[0] else parameter.replace(kind=Parameter.KEYWORD_ONLY)
                found.setdefault(parameter.name, (each, passed_on))
        if Parameter.VAR_KEYWORD not in kinds:
            break
    shown = sorted(found.items(), key=lambda item: (item[1][1].kind, item[1][0] is last))
    cls.__signature__ = Signature([parameter for _, (_, parameter) in shown])
    described = {maker: descriptions(cleandoc(maker.__doc__ or "")) for maker in makers}
    lines = [described[maker][name] for name, (maker, _) in shown if name in described[maker]]
    if lines and cls.__doc__ and makers != [cls]:  # python -OO has no docstrings
        cls.__doc__ = _with_arguments(cleandoc(cls.__doc__), "".join(dict.fromkeys(lines)))


SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\n((?: {2,}.*\n?|\n(?= {2,}))+)", re.MULTILINE)


def descriptions(docstring: str) -> dict[str, str]:
    """The lines below ``Args:`` of a docstring without common indentation, by the name of each argument."""
    section = SECTION.search(docstring)
    if section is None:
        return {}
    margin = re.match(" *", section[1])[0]  # ty: ignore[not-subscriptable]
    found = {}
    for item in re.split(rf"\n+(?={margin}\S)", section[1].rstrip()):
        names = item.partition(":")[0].strip().partition(" (")[0]
        for name in names.split(","):
            found[name.strip()] = f"{item}\n"
    return found


def _with_arguments(text: str, lines: str) -> str:
    if SECTION.search(text):
        return SECTION.sub(lambda _: f"Args:\n{lines}", text, count=1)
    before, *after = re.split(r"^(?=Shapes:|Attributes:|Raises:)", text, maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join([before.rstrip(), f"Args:\n{lines}".rstrip(), *after])
