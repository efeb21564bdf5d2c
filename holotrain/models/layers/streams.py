"""One stream into two and back: reversible blocks in the place of residual ones."""

from torch import Tensor

from holotrain.reversible import ReversibleSequence


class AveragedStreams(ReversibleSequence):
    """Reversible blocks between one stream and one stream: both start as the input, and their mean is the output.

    So what stands around the blocks, and every parameter's name, is what it is around a plain ``ResidualSequence``.
    Takes the arguments of :class:`~holotrain.reversible.ReversibleSequence`.
    """

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        y1, y2 = super().forward(x, x, f_kwargs, g_kwargs)
        return (y1 + y2) / 2
