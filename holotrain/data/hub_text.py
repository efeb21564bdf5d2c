"""Text of the Hugging Face Hub, of folders that ``save_to_disk`` wrote, and of files that the datasets library reads."""

from dataclasses import replace
from typing import Any, Literal

from holotrain.data.hub import opened
from holotrain.data.text import TextDataModule
from holotrain.data.text.tokenise import Rows
from holotrain.ranges import require_one_of


class HubText(TextDataModule):
    """Text of a data set of the Hugging Face Hub, of a folder that ``save_to_disk`` of its datasets library wrote, or of files.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        config: configuration of a data set that has several
        split: split of the data set that is divided by val_fraction and test_fraction
        val_split: split for the validation set; null: use val_fraction
        test_split: split for the test set; null: use test_fraction
        text: column of the text
        label: column of the class; null: no classes
        on_error: what to do with a row without text or class: error (end the run) or skip (leave it out)
        options: those of :class:`TextDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        text: str = "text",
        label: str | None = None,
        on_error: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_one_of(("error", "skip"), on_error=on_error)
        self.name, self.config = name, config
        self.splits = {"val": val_split, "test": test_split, None: split}
        self.text_column, self.on_error = text, on_error
        self.label = label if self.labels else None

    def rows(self) -> list[Rows]:
        reading = self.reading(text=self.text_column, label=self.label, skip=self.on_error == "skip")
        val, test = reading.fractions
        reading = replace(reading, fractions=(0.0 if self.splits["val"] else val, 0.0 if self.splits["test"] else test))
        return [
            Rows(opened(self.name, self.config, split, self.cache, self.streaming), reading, part)
            for part, split in self.splits.items()
            if split is not None
        ]
