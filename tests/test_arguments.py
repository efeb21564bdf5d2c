"""Arguments that a class passes on, as ``help`` and ``inspect.signature`` show them."""

import inspect

import pytest

from holotrain import data, synthesis, tasks
from holotrain.arguments import show_arguments

PUBLIC = [
    getattr(package, name)
    for package in (data, synthesis, tasks)
    for name in package.__all__
    if inspect.isclass(getattr(package, name)) and name not in ("Loader", "ResumableLoader")  # which take DataLoader's
]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_every_argument_is_named_and_described(cls):
    parameters = inspect.signature(cls).parameters.values()
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters)
    assert all(inspect.getdoc(cls).count(f"\n    {each.name}: ") == 1 for each in parameters)


class Base:
    """The base.

    Args:
        height, width: of a picture,
            in pixels
        depth: of a colour

    Raises:
        ValueError: never.
    """

    def __init__(self, height: int, width: int, depth: int = 8) -> None:
        self.size = (height, width, depth)


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


def shown(cls):
    return str(inspect.signature(cls)), inspect.getdoc(cls).partition("Args:\n")[2].partition("\n\n")


def test_the_chain_is_shown_without_repetition():
    show_arguments(Framed)
    signature, (arguments, _, rest) = shown(Framed)
    assert signature == "(*, frame: int, depth: int = 1, height: int, width: int)"
    assert arguments == "    frame: in pixels\n    depth: of the frame\n    height, width: of a picture,\n        in pixels"
    assert rest == "Raises:\n    ValueError: never."

    class Bare(Framed):
        """Without arguments of its own.

        Raises:
            ValueError: never.
        """

    show_arguments(Bare, last=Framed)
    signature, (described, _, rest) = shown(Bare)
    assert (described, rest) == (
        "    height, width: of a picture,\n        in pixels\n    frame: in pixels\n    depth: of the frame",
        "Raises:\n    ValueError: never.",
    )


def test_a_class_that_takes_anything_or_names_all_is_left_as_it_is():
    class Anything(Framed):
        """Takes anything."""

        def __init__(self, one: int, **others: object) -> None:
            pass

    class Own(Framed):
        """Takes one."""

        def __init__(self, one: int) -> None:
            super().__init__(one)

    show_arguments(Own)
    show_arguments(Anything, [Anything, dict])
    assert str(inspect.signature(Own)) == "(one: int)" and Own.__doc__ == "Takes one."
    assert "others" in inspect.signature(Anything).parameters and Anything.__doc__ == "Takes anything."
