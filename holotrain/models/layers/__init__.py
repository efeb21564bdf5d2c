"""Building blocks of the models that several families share.

attention    multi-head self-attention, rotary positions, the cache of keys and values
packing      padded batches without their padding
blocks       the two branches of a block, plain and reversible sequences of blocks, options and streams of reversible models,
             what a pipeline asks of a model that it divides
patches      from images to tokens, merging of tokens, first values
text_layers  from tokens to embeddings, first values, the loss over a long vocabulary in pieces
"""
