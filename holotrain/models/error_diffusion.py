"""A network for images that is trained by error diffusion."""

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
    ) -> None:
        super().__init__(channels * image_size**2, 1 if classes == 2 else classes, width, depth, rule, u0)
