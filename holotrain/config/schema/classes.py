"""What the chosen classes are, by their base classes, and which of ours go together. Nothing is imported for it."""

from holotrain.config.chosen import Chosen
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError

IMAGES = "holotrain.data.images.ImageDataModule"
TEXT = "holotrain.data.text.module.TextDataModule"
CLASSIFIER = "holotrain.tasks.classification.Classifier"
IMAGE_CLASSIFIER = "holotrain.tasks.image_classification.ImageClassifier"
SEQUENCE_CLASSIFIER = "holotrain.tasks.sequence_classification.SequenceClassifier"
ERROR_DIFFUSION = "holotrain.tasks.error_diffusion.ErrorDiffusionClassifier"
CAUSAL_LM = "holotrain.tasks.causal_lm.CausalLM"
MASKED_LM = "holotrain.tasks.masked_lm.MaskedLM"

TIMM = "holotrain.models.foreign.Timm"
HUGGING_FACE = "holotrain.models.huggingface.HuggingFace"

_ROBERTA = "holotrain.models.roberta.RoBERTa"
_IMAGES = ("holotrain.models.vit.ViT", "holotrain.models.swin.Swin", "holotrain.models.mvit.MViT")
FIT = {
    # An image classifier too, so first.
    ERROR_DIFFUSION: (("holotrain.models.image_error_diffusion.ImageErrorDiffusion",), IMAGES),
    IMAGE_CLASSIFIER: ((*_IMAGES, TIMM, HUGGING_FACE), IMAGES),
    SEQUENCE_CLASSIFIER: ((_ROBERTA, HUGGING_FACE), TEXT),
    CAUSAL_LM: (("holotrain.models.gpt.GPT", HUGGING_FACE), TEXT),
    MASKED_LM: ((_ROBERTA, HUGGING_FACE), TEXT),
}
"""The models and the data of each of our tasks."""


HEADS = {
    IMAGE_CLASSIFIER: "image_classification",
    SEQUENCE_CLASSIFIER: "sequence_classification",
    CAUSAL_LM: "causal_lm",
    MASKED_LM: "masked_lm",
}
"""The head of a Hugging Face model for each of our tasks."""


def is_a(chosen: Chosen | str | None, *bases: str) -> bool:
    """Whether this, or the class of this name, is one of the classes or derived from one."""
    own = signature(chosen).bases if isinstance(chosen, str) else chosen.bases if chosen else ()
    return not {*bases}.isdisjoint(own)


def takes(chosen: Chosen | str | None, parameter: str) -> bool:
    """Whether this, or the class of this name, has such a parameter."""
    return parameter in _options(chosen)


def default_backward(model: Chosen | str | None) -> str | None:
    """The default of the model's parameter ``backward``; None if it has none."""
    option = _options(model).get("backward")
    return option.default if option and isinstance(option.default, str) else None


def _options(chosen: Chosen | str | None) -> dict[str, Option]:
    target = chosen.target if isinstance(chosen, Chosen) else chosen
    return {} if target is None else signature(target).options


def reversible(model: Chosen | None) -> bool:
    """Whether this is one of our models that can recompute activations from their outputs."""
    return takes(model, "store")


def check_together(task: Chosen, model: Chosen | None, data: Chosen) -> None:
    """
    Raises:
        UserError: one of our tasks is to train a model, or from data, of ours for another task.
    """
    fitting = next((FIT[each] for each in FIT if is_a(task, each)), None)
    if fitting is None:
        return
    models, of = fitting
    if is_a(data, IMAGES, TEXT) and not is_a(data, of):
        raise UserError(
            f"data: {task.name} learns from {'images' if of == IMAGES else 'text'}, which {data.name} does not have"
        )
    trainers = [each for each, (theirs, _) in FIT.items() if is_a(model, *theirs)]
    if trainers and not is_a(model, *models):
        raise UserError(
            f"model: {task.name} trains {_names(models)}, not {model.name}; use another model, or the task of "
            f"{_names(trainers)}"
        )


def _names(targets: tuple[str, ...] | list[str]) -> str:
    return " or ".join(target.rpartition(".")[2] for target in targets)
