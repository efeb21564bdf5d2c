"""Arguments that a class passes on, as ``help`` and ``inspect.signature`` show them."""

import inspect

import pytest

from holotrain import data, models, synthesis, tasks
from holotrain.targets import show_arguments

PUBLIC = [
    getattr(package, name)
    for package in (data, models, synthesis, tasks)
    for name in package.__all__
    if inspect.isclass(getattr(package, name))
]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_every_argument_is_named_and_described(cls):
    parameters = inspect.signature(cls).parameters.values()
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters)
    assert all(inspect.getdoc(cls).count(f"\n    {each.name}: ") == 1 for each in parameters)


class Base:
    """The base.

    Args:
        height, width (int): of a picture,
            in pixels
        depth: of a colour
    """

    def __init__(self, height: int, width: int, depth: int = 8) -> None:
        self.size = (height, width, depth)


def test_the_chain_is_shown_without_repetition():
    class Framed(Base):
        """A frame around it.

        Args:
            frame: in pixels
            depth: of the frame
            options: those of :class:`Base`

        Raises:
            ValueError: never.
        """

        def __init__(self, *, frame: int, depth: int = 1, **options: int) -> None:
            super().__init__(depth=depth, **options)

    show_arguments(Framed)
    assert str(inspect.signature(Framed)) == "(*, frame: int, depth: int = 1, height: int, width: int)"
    picture = "    height, width (int): of a picture,\n        in pixels"
    own = "    frame: in pixels\n    depth: of the frame"
    assert inspect.getdoc(Framed) == f"A frame around it.\n\nArgs:\n{own}\n{picture}\n\nRaises:\n    ValueError: never."
