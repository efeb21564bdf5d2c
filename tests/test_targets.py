"""Arguments that a class passes on, as ``help`` and ``inspect.signature`` show them."""

import inspect

import pytest

from holotrain import data, models, synthesis, tasks

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
