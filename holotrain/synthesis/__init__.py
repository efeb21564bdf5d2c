"""Holographic weight synthesis: gradients bound with the inputs of their layers, in the Fourier domain. Needs only torch.

binding     phasor_bind, hadamard_bind and their inverses, as functions of vectors
transforms  the real Fourier and the randomised Walsh-Hadamard transform
recipe      all options, with their checks
layers      which parameters share a key
rows        gradients as rows of equal length, in one contiguous buffer
keys        the inputs of layers, gathered by forward hooks
hologram    the memory and its precision
association what happens to a spectrum: superposed and read back
updates     the step over all rows, eager or as one CUDA graph, and the options that need inner products of layers
delayed     the step on the CPU while a GPU goes on, applied a step late
synthesis   HolographicSynthesis: the hook between backward and optimizer step
"""

from holotrain.synthesis.binding import hadamard_bind, hadamard_unbind, phasor_bind, phasor_unbind
from holotrain.synthesis.recipe import Recipe
from holotrain.synthesis.synthesis import EACH, HolographicSynthesis

__all__ = ["EACH", "HolographicSynthesis", "Recipe", "hadamard_bind", "hadamard_unbind", "phasor_bind", "phasor_unbind"]
