"""The engine: reversible blocks and their backward schedules. It needs only torch.

coupling            reversible blocks of two streams, and what a coupling is
sequence            a sequence of them: the main class
backward_option     what a user gives as backward, store and keep
schedule            what the forward does with a block, by its schedule
recording           a branch runs in the forward, and again in the backward
tape                the backward of rebuilt blocks
kept_results        results that a recomputation reuses
compiled            blocks that torch.compile recomputes
fused               compiled branches that run again in one graph with their gradients
block_inputs        the ways to keep a block's input until the backward
reads               parameters, buffers and arguments, which must be the same in the recomputation
settings            random number generators, autocast, attention kernels and the like, put back for the recomputation
side_stream         a second CUDA stream
checks              whether what is rebuilt is right, and what follows if not
grid                the fixed-point grid of the streams, which follows them
graphs              a training step as one CUDA graph, and its random number generators
context             whether a recomputation, a plan, a capture or a backward is running

in_place            has the blocks of another model run again in the backward, and takes that back
replaced_forward    a module's forward, replaced in place, and the stream in its calls
lists_of_blocks     the lists of blocks in a model
chunks              a causal language model, a chunk of its sequence at a time, through its own cache
chunk_weights       its weights, and the sums of their gradients
chunked_call        a call of such a model, by chunk, and what is refused
chunk_keys          keys, values and their gradients, on the device or in main memory
chunk_cache         these as a cache of transformers
chunk_attention     its attention in a chunk
attention_parts     attention to a part of the keys, which can be joined with that to others
main_memory         tensors in pinned main memory, which come to the device ahead of their use
tiles               the MLPs and norms of another model, some tokens at a time
tile_graph          how tiles are cut and put together in autograd's graph
head_groups         attention of another model, some heads at a time
tokenwise           which modules work token by token, so that they can be taken in tiles
token_rules         which operators keep tokens apart
tiled_loss          the loss of another model, some tokens at a time
pending             its logits, which wait for the loss
tiled_cross_entropy the loss of such logits, some tokens at a time
loss_ops            that of one tile in one kernel, as operators
loss_kernels        these kernels, of Triton
"""

from holotrain.reversible.chunks import train_in_chunks
from holotrain.reversible.coupling import ReversibleBlock
from holotrain.reversible.in_place import recompute, undo
from holotrain.reversible.schedule import checkpointed
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["ReversibleBlock", "ReversibleSequence", "checkpointed", "recompute", "train_in_chunks", "undo"]
