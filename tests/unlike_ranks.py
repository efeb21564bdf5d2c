"""Data that are others, or are not there, in the second process."""

import os
from pathlib import Path

from holotrain.data import Digits
from holotrain.errors import UserError


class Unlike(Digits):
    """
    Args:
        what: ``fewer`` (classes), ``mistake`` (of the user) or ``missing`` (a file)
    """

    def __init__(self, what: str, **options) -> None:
        super().__init__(**options)
        self.what = what

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if os.environ["RANK"] != "1":
            return
        if self.what == "fewer":
            self.class_names = self.class_names[:-1]
        elif self.what == "mistake":
            raise UserError("give other data")
        else:
            Path("none.txt").read_text()
