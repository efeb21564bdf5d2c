"""What the command line reads of a constructor: every option has a type and a meaning, and no other is taken."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from holotrain.config import option_groups
from holotrain.config.annotations import checked
from holotrain.config.composition import config_folder, models
from holotrain.config.signatures import REQUIRED, UNKNOWN, signature
from holotrain.errors import UserError
from holotrain.targets import targets

FILES = [path for group in ("data", "task") for path in Path(config_folder(), group).glob("*.yaml")]
NODES = [*models().values(), *(OmegaConf.to_container(OmegaConf.load(path)) for path in FILES)]
CONSTRUCTORS = sorted({target for node in NODES for _, target in targets(node)})


@pytest.mark.parametrize("target", CONSTRUCTORS)
def test_every_option_has_a_type_a_default_and_a_meaning(target):
    found = signature(target)
    assert not found.takes_others
    for name, option in found.options.items():
        assert option.type and option.meaning and option.default is not UNKNOWN, name
        if option.default is not REQUIRED:
            assert checked(name, option.type, option.default) == option.default


@pytest.mark.parametrize(
    "target",
    sorted(
        {*option_groups.COMPATIBLE, *(name for models, data in option_groups.COMPATIBLE.values() for name in (*models, data))}
    ),
)
def test_classes_that_options_depend_on_are_where_they_are_said_to_be(target):
    """A name of yesterday would make every check of it pass in silence."""
    assert target in signature(target).bases


@pytest.mark.parametrize(
    ("target", "option", "given", "taken"),
    [
        ("holotrain.models.RevViT", "backward", ["autograd", "reversible+attention"], ["autograd", "reversible+attention"]),
        ("holotrain.models.RevGPT", "exact", True, True),
        ("holotrain.models.RevGPT", "exact", 12, 12),
        ("holotrain.data.Digits", "classes", [3, "5"], [3, "5"]),
        ("holotrain.data.TextFiles", "max_tokens", None, None),
        ("holotrain.tasks.MaskedLM", "mask_probability", 0.3, 0.3),
    ],
)
def test_values_are_taken_as_they_are_meant(target, option, given, taken):
    found = checked(option, signature(target).options[option].type, given)
    assert found == taken and type(found) is type(taken)


def test_a_word_is_none_of_a_choice_of_numbers():
    with pytest.raises(UserError, match=r"model.depth: '17' is not one of 18, 34. Did you mean '18'\?"):
        checked("model.depth", "Literal[18, 34]", "17")
