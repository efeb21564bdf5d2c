"""Holographic weight synthesis: gradients bound with the inputs of their layers, in the Fourier domain. Needs only torch.

binding  the Fourier and Hadamard transforms, binding of vectors; the hologram, a memory for bound vectors
options  all options, with their checks
keys     which parameters share a key; the inputs of layers, gathered by forward hooks
rows     gradients as rows of equal length in one contiguous buffer, and back into each .grad
updates  the step over all rows, eager or as one CUDA graph, and the options that need inner products of layers
delayed  the step on the CPU while a GPU goes on, applied a step late
hook     HolographicSynthesis: the hook between backward and optimizer step
"""

from holotrain.synthesis.binding import phasor_bind, phasor_unbind
from holotrain.synthesis.hook import HolographicSynthesis

__all__ = ["HolographicSynthesis", "phasor_bind", "phasor_unbind"]
