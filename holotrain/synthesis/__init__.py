"""Holographic weight synthesis: gradients bound with what a layer saw, in the Fourier domain. Needs torch alone.

binding     phasor_bind and its kin, as functions of vectors
transforms  the real Fourier and the randomised Walsh-Hadamard transform
recipe      every option, checked
layers      which parameters share a key
rows        gradients as rows of equal length, in one contiguous buffer
keys        what a layer saw, gathered by forward hooks
hologram    the memory: precision, or on the CPU behind asynchronous copies
association what becomes of a spectrum: bound, or superposed and read back
direction   the last touch: norm, share of the raw gradient, descent guarantee
bundle      what a step makes of rows of one length
weaver      the step over all of them
graphed     a computation as one CUDA graph
synthesis   HolographicSynthesis: the hook between backward and optimizer
"""

from holotrain.synthesis.binding import hadamard_bind, hadamard_unbind, phasor_bind, phasor_unbind
from holotrain.synthesis.recipe import Recipe
from holotrain.synthesis.synthesis import HolographicSynthesis

__all__ = ["HolographicSynthesis", "Recipe", "hadamard_bind", "hadamard_unbind", "phasor_bind", "phasor_unbind"]
