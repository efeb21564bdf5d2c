"""A network for images that is trained by error diffusion."""

from typing import Any

from holotrain.error_diffusion import ErrorDiffusionNetwork


class ImageErrorDiffusion(ErrorDiffusionNetwork):
    """Every pixel is an input. There is one output for each class; two classes share one output, which is that of the second.

    Args:
        image_size: in pixels; the image is square.
        channels: of the image.
        classes: number of classes, at least 2.
        options: ``width``, ``depth``, ``rule`` and ``u0`` of
            :class:`~holotrain.error_diffusion.ErrorDiffusionNetwork`.

    Shapes: images (B, channels, image_size, image_size) -> (B, classes), or (B, 1), each in (0, 1).
    """

    def __init__(self, image_size: int, channels: int = 1, classes: int = 10, **options: Any) -> None:
        super().__init__(channels * image_size**2, 1 if classes == 2 else classes, **options)
