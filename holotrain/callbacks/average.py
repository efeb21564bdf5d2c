"""WeightAverage: validates, tests and saves a moving average of the weights."""

from lightning.pytorch.callbacks import EMAWeightAveraging


class WeightAverage(EMAWeightAveraging):
    """Exponential moving average of the weights, which is validated, tested and saved in place of the weights.

    Args:
        decay: weight of the previous average in each update, in [0, 1)
        update_every_n_steps: update the average every n optimizer steps
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} is out of range; it must be in [0, 1)")
        if update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps {update_every_n_steps} is out of range; it must be at least 1")
        super().__init__(decay=decay, update_every_n_steps=update_every_n_steps)
