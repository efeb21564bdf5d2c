"""A data set restricted to some of its classes, such as two of ten."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset

from holotrain.checks import one_of
from holotrain.errors import UserError


def chosen_classes(asked: Sequence[str | int], names: Sequence[str]) -> list[int]:
    """The indices of the requested classes, given by name, or by number if no class has that name. An empty list means all.

    Raises:
        UserError: a class does not exist or is given twice, or only one is given.
    """
    if not asked:
        return list(range(len(names)))
    found = [_index(one, names) for one in asked]
    for index in found:
        if found.count(index) > 1:
            raise UserError(f"data.classes: {names[index]} is given twice")
    if len(found) < 2:
        raise UserError(f"data.classes: {names[found[0]]} is the only class; give at least two")
    return found


def _index(asked: str | int, names: Sequence[str]) -> int:
    if type(asked) is int and str(asked) not in names and 0 <= asked < len(names):
        return asked
    one_of("data.classes", str(asked), names)
    return list(names).index(str(asked))


class OfClasses(Dataset):
    """The samples of some classes, labelled 0, 1, ... in the order of ``classes``.

    Args:
        dataset: of (image, label).
        labels: (N,) the class of each sample.
        classes: the classes to keep.
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
