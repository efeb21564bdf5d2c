"""Arguments that a class passes on, as ``help`` and ``inspect.signature`` show them."""

import inspect
from dataclasses import dataclass

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

    Raises:
        ValueError: never.
    """

    def __init__(self, height: int, width: int, depth: int = 8) -> None:
        self.size = (height, width, depth)


@pytest.fixture
def framed():
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
    return Framed


def names(cls):
    return list(inspect.signature(cls).parameters)


def test_the_chain_is_shown_without_repetition(framed):
    assert str(inspect.signature(framed)) == "(*, frame: int, depth: int = 1, height: int, width: int)"
    picture = "    height, width (int): of a picture,\n        in pixels"
    own = "    frame: in pixels\n    depth: of the frame"
    rest = "Raises:\n    ValueError: never."
    assert inspect.getdoc(framed) == f"A frame around it.\n\nArgs:\n{own}\n{picture}\n\n{rest}"

    class Bare(framed):
        """Without arguments of its own.

        Raises:
            ValueError: never.
        """

    show_arguments(Bare, last=framed)
    assert names(Bare) == ["height", "width", "frame", "depth"]
    assert inspect.getdoc(Bare) == f"Without arguments of its own.\n\nArgs:\n{picture}\n{own}\n\n{rest}"


@pytest.mark.parametrize("base", [data.CIFAR10, tasks.ImageClassifier])
def test_classes_of_users_show_what_they_say_themselves(base):
    class Own(base):
        """Theirs.

        Args:
            one (int): theirs
        """

        def __init__(self, one: int, **others: int) -> None:
            super().__init__(**others)

    class Inherits(base):
        """Theirs."""

    @dataclass
    class Data(base):
        """Theirs."""

        path: str = ""

    assert names(Own) == ["one", "others"] and "one (int): theirs" in Own.__doc__
    assert names(Data) == ["path"]
    assert names(Inherits) == [*inspect.signature(base.__init__).parameters][1:] and Inherits.__doc__ == "Theirs."
