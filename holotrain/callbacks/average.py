"""WeightAverage: validates, tests and saves a moving average of the weights."""

from lightning.pytorch.callbacks import EMAWeightAveraging

from holotrain.ranges import require_at_least, require_within


class WeightAverage(EMAWeightAveraging):
    """Exponential moving average of the weights, which is validated, tested and saved in place of the weights.

    Args:
        decay: weight of the previous average in each update, in [0, 1)
        update_every_n_steps: update the average every n optimizer steps
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1) -> None:
        require_within(0, 1, decay=decay)
        require_at_least(1, update_every_n_steps=update_every_n_steps)
        super().__init__(decay=decay, update_every_n_steps=update_every_n_steps)
