"""RandomState: a resumed training draws the numbers that the uninterrupted one would have drawn."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class RandomState(pl.Callback):
    """Keeps the global random states (torch on CPU and GPUs, NumPy, Python) in checkpoints and restores them on resuming.

    They are restored when training starts, before the first batch is fetched: mixing on the way to the device draws from them
    as dropout does. Plain containers, as ``torch.load(weights_only=True)`` wants them.
    """

    def __init__(self) -> None:
        self._to_restore: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, internal, gauss_next = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": {"name": name, "keys": keys.tolist(), "rest": [position, has_gauss, gauss]},
            "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._to_restore = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state, self._to_restore = self._to_restore, None
        if state is None:
            return
        torch.set_rng_state(state["torch"])
        for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)
        numpy, python = state["numpy"], state["python"]
        np.random.set_state((numpy["name"], np.array(numpy["keys"], dtype=np.uint32), *numpy["rest"]))
        random.setstate((python["version"], tuple(python["internal"]), python["gauss_next"]))
