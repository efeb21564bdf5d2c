"""Error diffusion (the ED method; Kaneko, 1999): the error goes to all hidden layers at once, without a backward pass.

Cells come in pairs, one excitatory and one inhibitory, and stay so. A weight is a magnitude times the signs of the two cells
that it joins. The scalar error of an output reaches every hidden layer unchanged, so no layer waits for another's update.

cells  ErrorDiffusionNetwork, and ImageErrorDiffusion for images: the weights, and a forward whose backward diffuses; sign
       violations, dead cells, alignment
rules  how much a source learns from an error: Kaneko's rule, the article's rule; the updates of all hidden layers

Shape letters: B batch, D outputs (each with its own network), L hidden layers, W pairs per layer, C = 2 W cells.
"""

from holotrain.error_diffusion.cells import ErrorDiffusionNetwork, ImageErrorDiffusion

__all__ = ["ErrorDiffusionNetwork", "ImageErrorDiffusion"]
