"""The ED method (Kaneko, 1999): learning by an error that is diffused to all hidden layers at once, without a backward pass.

Cells are excitatory or inhibitory, in pairs, and stay so; a weight is a magnitude times the signs of the two cells it
joins. One scalar error an output reaches every hidden layer as it is, so that no layer waits for another's update.

network       ErrorDiffusionNetwork: the weights, and a forward whose backward diffuses
diffusion     the rule as an autograd Function: gradients that are minus the updates
rules         what a source learns from an error: Kaneko's rule, the article's
layers        the pass through the layers
contraction   the updates of all hidden layers, without an axis of the batch
inspection    sign violations, dead cells, alignment with the true gradient

Legend: B batch, D outputs (each has a network of its own), L hidden layers, W pairs a layer, C = 2 W cells.
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
