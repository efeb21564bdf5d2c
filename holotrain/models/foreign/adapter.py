"""What the adapters to other libraries share."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from holotrain.models.pretrained.files import read_weights
from holotrain.models.pretrained.loading import Loaded
from holotrain.reversible import make_reversible

OURS = "model.model."
"""Before the names of the weights in a checkpoint of holotrain: the task's model, and the adapter's."""


class Foreign(nn.Module):
    """A model of another library, with the inputs and outputs of holotrain's models.

    Attributes:
        model: the model of the other library. It is whole: it has its own configuration, and its own methods work.
    """

    model: nn.Module

    def wrap(self, model: nn.Module, reversible: str | None, blocks: str | Sequence[str] | None) -> None:
        """Keeps the model, with its blocks made reversible in place.

        Args:
            reversible: bits of each number that the forward keeps, as ``"2bit"``; None: the blocks stay as they are.
            blocks: names of the lists of blocks; None: the only one.

        Raises:
            ValueError: ``blocks`` without ``reversible``, or blocks that cannot be made reversible.
        """
        self.model = model
        if reversible is None:
            if blocks is not None:
                raise ValueError("blocks names the blocks to make reversible; give reversible=2bit too")
            return
        make_reversible(model, blocks, bits=int(reversible.removesuffix("bit")))

    @property
    @abstractmethod
    def head(self) -> nn.Module | None:
        """The classifier; None: it has none of its own."""

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
    def save(
        self,
        folder: Path,
        class_names: Sequence[str] | None = None,
        statistics: Sequence[Sequence[float]] | None = None,
        tokenizer: str | None = None,
    ) -> list[str]:
        """Writes the model in the format of its own library, which reads it without holotrain.

        Args:
            folder: where to; it exists.
            class_names: of a classifier.
            statistics: mean and standard deviation of each channel, by which images were normalised.
            tokenizer: the content of a tokenizer.json.

        Returns:
            The names of the files.
        """


def foreign_weights(path: str) -> dict[str, Tensor]:
    """The weights in a local file or folder, under the names of the other library, also from a checkpoint of holotrain.

    Raises:
        ValueError: there is no such file, or it cannot be read as weights.
    """
    weights = read_weights(path)
    ours = {name.removeprefix(OURS): tensor for name, tensor in weights.items() if name.startswith(OURS)}
    return ours or weights


def take_over(model: nn.Module, given: dict[str, Tensor], source: str, head: Collection[str] = ()) -> Loaded:
    """Copies weights into a model, in place.

    Args:
        given: under the names of the model.
        source: where they are from, for messages.
        head: names of the tensors that may have another shape, or be missing; they are then left out together.

    Raises:
        ValueError: another tensor has another shape, or fewer than half of the model's tensors are among them. The model is
            then unchanged.
    """
    own = model.state_dict()
    new = [name for name in head if name not in given or given[name].shape != own[name].shape]
    left_out = set(head) if new else set()
    fitting = {name: tensor for name, tensor in given.items() if name in own and name not in left_out}
    for name, tensor in fitting.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{source} is of another model: {name} is {tuple(tensor.shape)} there and {tuple(own[name].shape)} in this one"
            )
    places = {own[name].data_ptr() for name in fitting}
    missing = [name for name in own if own[name].data_ptr() not in places and name not in left_out]
    if 2 * len(missing) > len(own):
        raise ValueError(
            f"{source} is of another model: it has {len(own) - len(missing)} of the {len(own)} tensors of this one"
        )
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    unexpected = tuple(name for name in given if name not in own)
    return Loaded(source, tuple(fitting), tuple(missing), unexpected, tuple(sorted(left_out)), ())


def save_tensors(weights: dict[str, Tensor], path: Path) -> None:
    """
    Raises:
        ValueError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # which is no OSError, whatever the system said
        raise ValueError(f"cannot write {path} ({error})") from error
