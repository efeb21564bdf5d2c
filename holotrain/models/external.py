"""Models of other libraries, with the inputs and outputs that the tasks expect, and image classifiers of timm."""

from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from holotrain.files import write_json
from holotrain.models.checkpoint_files import CONFIG, WEIGHTS, read_weights, require_same, save_tensors
from holotrain.models.pretrained import require_whole, take_over
from holotrain.targets import blaming, first_line, needed

CHECKPOINT_PREFIX = "model.model."
"""Before the names of the weights in a checkpoint of holotrain: the task's model, and the adapter's."""

TIMM = ("timm", "this model needs timm", "timm")

LOADING_ARGUMENTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
"""Arguments of ``timm.create_model`` that load something."""

OWN_ARGUMENTS = {"num_classes": "classes", "in_chans": "channels", "img_size": "image_size"}
"""Arguments of ``timm.create_model`` for which the adapter has its own."""

PUBLISHED_KEYS = (
    *("interpolation", "crop_pct", "crop_mode", "mean", "std"),
    *("first_conv", "classifier", "pool_size", "fixed_input_size"),
)
"""What the configuration of timm's published weights says that holds for trained ones too."""


@contextmanager
def allocated() -> Generator[None]:
    """
    Raises:
        ValueError: an allocation within it failed on the CPU.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("can't allocate memory", "size calculation overflowed")):
            raise
        refused = str(error).strip().splitlines()[-1]
        raise ValueError(f"its weights do not fit into memory; holotrain plan shows their size ({refused})") from error


class ExternalModel(nn.Module):
    """A model of another library, with the inputs and outputs of holotrain's models.

    Attributes:
        model: the model of the other library. It is whole: it has its own configuration, and its own methods work.
    """

    model: Any

    @property
    @abstractmethod
    def head(self) -> nn.Module | None:
        """The classifier; None: it has none of its own."""

    def load_weights(self, weights: dict[str, Tensor], source: str) -> str:
        """Copies weights into the model, in place: all of the classifier or nothing of it. Returns a report, in one line.

        Raises:
            ValueError: the weights belong to another model.
        """
        head = set() if self.head is None else {id(tensor) for tensor in self.head.parameters()}
        names = {name for name, tensor in self.model.named_parameters() if id(tensor) in head}
        return str(take_over(self.model.state_dict(keep_vars=True), weights, source, names))

    @abstractmethod
    def start_from(self, pretrained: str | None) -> str | None:
        """Loads the weights that a training starts from, in place.

        Args:
            pretrained: a local file or folder; None: what the model's own options name, if anything.

        Returns:
            What was loaded, in one line for people; None: nothing was.

        Raises:
            ValueError: there are no such weights, or they belong to another model.
        """

    @abstractmethod
    def load_saved(self, weights: dict[str, Tensor]) -> None:
        """Takes the weights that :meth:`save` wrote for a model with the same arguments, in place. Raises a ValueError if they
        are those of another model."""

    @abstractmethod
    def save(self, folder: Path, described: Mapping[str, Any]) -> list[str]:
        """Writes the model in the format of its own library, which reads it without holotrain.

        Args:
            folder: where to; it exists.
            described: of the data, where known: ``class_names``; ``statistics``, the mean and the standard deviation of each
                channel, by which images were normalised; ``interpolation`` and ``crop_pct``, by which they were resized and
                cut; ``tokenizer``, the content of a tokenizer.json.

        Returns:
            The names of the files.
        """


def external_weights(path: str) -> dict[str, Tensor]:
    """The weights in a local file or folder, under the names of the other library, also from a checkpoint of holotrain.

    Raises:
        ValueError: there is no such file, it cannot be read as weights, or they are not whole.
    """
    weights = read_weights(path)
    require_whole(weights)
    prefix = CHECKPOINT_PREFIX
    from_checkpoint = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    return from_checkpoint or weights


def not_of_timm(name: str) -> str:
    """That timm has no model of this name, and those with similar names."""
    near = get_close_matches(name, needed(*TIMM).list_models(), cutoff=0.5)
    return f"timm has no model {name!r}; timm.list_models() lists them{', such as ' if near else ''}{', '.join(near)}"


class Timm(ExternalModel):
    """An image classifier of timm: images (B, channels, image_size, image_size) -> logits (B, classes).

    Args:
        name: a name in timm.list_models(), such as vit_small_patch16_224
        classes: number of classes
        image_size: height and width of the images, in pixels
        channels: colour channels of the images
        arguments: further arguments of timm.create_model, such as {drop_path_rate: 0.1}
        download: start from the published weights of this name, and download them if they are not in timm's cache

    Raises:
        ValueError: timm is not installed, has no such model, or refuses an argument.
    """

    def __init__(
        self,
        name: str,
        classes: int,
        image_size: int,
        channels: int = 3,
        arguments: dict[str, Any] | None = None,
        download: bool = False,
    ) -> None:
        super().__init__()
        timm, arguments = needed(*TIMM), dict(arguments or {})
        if not timm.is_model(name.partition(".")[0]):
            raise ValueError(not_of_timm(name))
        for key in (*LOADING_ARGUMENTS, *OWN_ARGUMENTS):
            if key in arguments:
                instead = OWN_ARGUMENTS.get(key, "pretrained or download")
                raise ValueError(f"arguments.{key} is not passed to timm; use {instead}")
        self.name, self.image_size, self.download = name, image_size, download
        self.arguments = {"num_classes": classes, "in_chans": channels, **arguments}
        self.model = self._made(timm)

    def _made(self, timm: ModuleType) -> nn.Module:
        with blaming("timm"), allocated():
            try:
                model = timm.create_model(self.name, img_size=self.image_size, **self.arguments)
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
                return timm.create_model(self.name, **self.arguments)  # convolutions take images of any size
        self.arguments["img_size"] = self.image_size
        return model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    @property
    def head(self) -> nn.Module | None:
        head = self.model.get_classifier()
        return head if isinstance(head, nn.Module) else None

    def start_from(self, pretrained: str | None) -> str | None:
        timm, source = needed(*TIMM), pretrained or f"timm's {self.name}"
        if pretrained is not None:
            weights = external_weights(pretrained)
        elif self.download:
            try:
                weights = timm.create_model(self.name, pretrained=True).state_dict()
            except Exception as error:  # whatever the network says
                raise ValueError(f"cannot download {source} ({first_line(error)})") from error
        else:
            return None
        # What timm itself does to published weights: new names, positions of another number of patches.
        module = import_module(timm.model_entrypoint(self.name.partition(".")[0]).__module__)
        sizes = {name: tensor.numel() for name, tensor in weights.items()}
        if fitted := getattr(module, "checkpoint_filter_fn", None):
            weights = fitted(weights, self.model)
        resized = [name for name, tensor in weights.items() if sizes.get(name, tensor.numel()) != tensor.numel()]
        own = self.model.state_dict()
        first = self.model.pretrained_cfg.get("first_conv")
        kernel = f"{first}.weight"
        if isinstance(first, str) and kernel in weights and weights[kernel].shape != own.get(kernel, weights[kernel]).shape:
            weights[kernel] = timm.models.adapt_input_conv(self.arguments["in_chans"], weights[kernel])
        said = f"; of another size, fitted: {', '.join(sorted(resized))}" if resized else ""
        return self.load_weights(dict(weights), source) + said

    def load_saved(self, weights: dict[str, Tensor]) -> None:
        require_same(self.model.state_dict(), weights)
        self.model.load_state_dict(weights)

    def save(self, folder: Path, described: Mapping[str, Any]) -> list[str]:
        """Writes ``model.safetensors``, for ``timm.create_model(name, ..., checkpoint_path=FILE)``, and ``config.json``, with
        which ``timm.create_model("local-dir:FOLDER", pretrained=True)`` needs no further argument."""
        arguments = {name: value for name, value in self.arguments.items() if name not in ("num_classes", "in_chans")}
        classes, channels = self.arguments["num_classes"], self.arguments["in_chans"]
        pretrained: dict[str, Any] = {"input_size": [channels, self.image_size, self.image_size], "num_classes": classes}
        if (statistics := described.get("statistics")) is not None:
            pretrained |= {"mean": list(statistics[0]), "std": list(statistics[1])}
        if "crop_pct" in described:
            pretrained |= {"crop_pct": described["crop_pct"], "crop_mode": "center"}
            pretrained["interpolation"] = described.get("interpolation", "bilinear")
        published = {name: value for name, value in self.model.pretrained_cfg.items() if name in PUBLISHED_KEYS}
        config = {
            "architecture": self.name.partition(".")[0],
            "num_classes": classes,
            "model_args": {"in_chans": channels, **arguments},
            "pretrained_cfg": {**published, **pretrained, "custom_load": False},
        }
        if (class_names := described.get("class_names")) is not None:
            config["label_names"] = list(class_names)
        save_tensors(self.model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / CONFIG, config)
        return [WEIGHTS, CONFIG]
