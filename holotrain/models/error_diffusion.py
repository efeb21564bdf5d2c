"""A network that learns images by error diffusion."""

from typing import Any

from holotrain.error_diffusion import ErrorDiffusionNetwork


class ImageErrorDiffusion(ErrorDiffusionNetwork):
    """Every pixel an input. An output for each class; for two classes one, that tells the second from the first.

    Args:
        image_size: in pixels; the image is square.
        channels: of the image.
        classes: how many there are to tell apart, at least 2.
        options: ``width``, ``depth``, ``rule`` and ``u0`` of
            :class:`~holotrain.error_diffusion.ErrorDiffusionNetwork`.

    Shapes: images (B, channels, image_size, image_size) -> (B, classes), or (B, 1), each in (0, 1).
    """

    def __init__(self, image_size: int, channels: int = 1, classes: int = 10, **options: Any) -> None:
        super().__init__(channels * image_size**2, 1 if classes == 2 else classes, **options)
