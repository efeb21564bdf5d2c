"""A network for images that is trained by error diffusion."""

from collections.abc import Sequence
from typing import Literal

from holotrain.error_diffusion import ErrorDiffusionNetwork


class ImageErrorDiffusion(ErrorDiffusionNetwork):
    """Every pixel is an input. There is one output for each class; two classes share one output, which is that of the second.

    Args:
        image_size: height and width of an image in pixels
        channels: color channels of an image
        classes: number of classes, at least 2
        width: pairs of one excitatory and one inhibitory cell per hidden layer
        depth: number of hidden layers
        rule: learning rule: kaneko (magnitudes only grow), article (they may also shrink) or backpropagation (the true
            gradient)
        u0: scale of the activation function sigmoid(2 u / u0)
        constants: activities of constant cells, whose weights are thresholds; null: as published with the rule (kaneko: 0.8 and
            -0.8, article: 1)
        initialization: of the weights: scaled to the number of sources, uniform in [0, 1), or normal (absolute values); null:
            as published (kaneko: uniform, article: normal)
        output_rate: factor of the learning rate of the output layer; null: as published (kaneko: 1, article: 1.25)

    Shapes: images (B, channels, image_size, image_size) -> (B, classes), or (B, 1), each in (0, 1).

    Raises:
        ValueError: as :class:`~holotrain.error_diffusion.ErrorDiffusionNetwork` does.
    """

    def __init__(
        self,
        image_size: int,
        channels: int = 1,
        classes: int = 10,
        width: int = 32,
        depth: int = 1,
        rule: Literal["kaneko", "article", "backpropagation"] = "kaneko",
        u0: float = 0.4,
        constants: Sequence[float] | None = (),
        initialization: Literal["scaled", "uniform", "normal"] | None = "scaled",
        output_rate: float | None = 1.0,
    ) -> None:
        outputs = 1 if classes == 2 else classes
        super().__init__(channels * image_size**2, outputs, width, depth, rule, u0, constants, initialization, output_rate)
