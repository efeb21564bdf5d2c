"""Text of the Hugging Face Hub, of folders that ``save_to_disk`` wrote, and of files that the datasets library reads."""

from dataclasses import replace
from typing import Any, Literal

from holotrain.data.hub import FromHub
from holotrain.data.text import TextDataModule
from holotrain.data.text.tokenise import Rows
from holotrain.ranges import require_one_of


class HubText(FromHub, TextDataModule):
    """Text of a data set of the Hugging Face Hub, of a folder that ``save_to_disk`` of its datasets library wrote, or of files.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        text: column of the text
        label: column of the class; null: no classes
        on_error: what to do with a row without text or class: error (end the run) or skip (leave it out)
        options: those of :class:`~holotrain.data.hub.FromHub` and :class:`TextDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        name: str,
        text: str = "text",
        label: str | None = None,
        on_error: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        require_one_of(("error", "skip"), on_error=on_error)
        self.text_column, self.on_error = text, on_error
        self.label = label if self.labels else None

    def rows(self) -> list[Rows]:
        shares = zip(("val", "test"), self.fractions, strict=True)
        reading = self.reading(text=self.text_column, label=self.label, skip=self.on_error == "skip")
        reading = replace(reading, fractions=tuple(0.0 if self.splits[part] else share for part, share in shares))
        found = self.opened(self.streaming)
        return [Rows(each, reading if part == "train" else replace(reading, part=part)) for part, each in found.items()]
