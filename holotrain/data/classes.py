"""A data set with some of its classes alone, such as two to be told apart."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset

from holotrain.checks import one_of
from holotrain.errors import UserError


def chosen_classes(asked: Sequence[str | int], names: Sequence[str]) -> list[int]:
    """The indices of classes that were asked for by name, or by number where no class has that name; none asked for: all.

    Raises:
        UserError: there is no such class, one comes twice, or there is only one.
    """
    if not asked:
        return list(range(len(names)))
    found = [_index(one, names) for one in asked]
    for index in found:
        if found.count(index) > 1:
            raise UserError(f"data.classes: {names[index]} is there twice")
    if len(found) < 2:
        raise UserError(f"data.classes: {names[found[0]]} alone has nothing to be told from; give at least two")
    return found


def _index(asked: str | int, names: Sequence[str]) -> int:
    if type(asked) is int and str(asked) not in names and 0 <= asked < len(names):
        return asked
    one_of("data.classes", str(asked), names)
    return list(names).index(str(asked))


class OfClasses(Dataset):
    """The samples of some classes, labelled by their place among them.

    Args:
        dataset: of (image, label).
        labels: (N,) the class of each sample.
        classes: which to keep.
    """

    def __init__(self, dataset: Dataset, labels: Tensor, classes: Sequence[int]) -> None:
        number = {label: place for place, label in enumerate(classes)}
        self.dataset = dataset
        self.kept = [(index, number[label]) for index, label in enumerate(labels.tolist()) if label in number]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place, label = self.kept[index]
        return self.dataset[place][0], label
