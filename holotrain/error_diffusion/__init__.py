"""Error diffusion (the ED method; Kaneko, 1999): the error goes to all hidden layers at once, without a backward pass.

Cells come in pairs, one excitatory and one inhibitory, and stay so. A weight is a magnitude times the signs of the two cells
that it joins. The scalar error of an output reaches every hidden layer unchanged, so no layer waits for another's update.

network       ErrorDiffusionNetwork: the weights, and a forward whose backward diffuses
diffusion     the rule as an autograd Function whose gradients are minus the updates
rules         how much a source learns from an error: Kaneko's rule, the article's rule
layers        the forward pass
contraction   the updates of all hidden layers, summed over the batch
inspection    sign violations, dead cells, alignment with the gradient

Shape letters: B batch, D outputs (each with its own network), L hidden layers, W pairs per layer, C = 2 W cells.
"""

from holotrain.error_diffusion.contraction import contract
from holotrain.error_diffusion.inspection import alignment, dead_cells, sign_violations
from holotrain.error_diffusion.network import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import BACKPROPAGATION, RULES

__all__ = [
    "BACKPROPAGATION",
    "RULES",
    "ErrorDiffusionNetwork",
    "alignment",
    "contract",
    "dead_cells",
    "sign_violations",
]
