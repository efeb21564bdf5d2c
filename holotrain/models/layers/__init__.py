"""Building blocks of the models.

branches            attention and MLP: the two branches of every block
attention           multi-head self-attention, with rotary (positions) and kv_cache (generation)
packing             padded batches without their padding
windows             attention within shifted windows (Swin)
pooling_attention   attention among pooled tokens (MViT)
residual            the sequence of blocks of a plain transformer (the reversible one is in holotrain.reversible)
reversible          the options of reversible models
streams             reversible blocks with one stream as input and output
stages              options that count blocks, in models with several sequences
fusion              fusion of two streams into one, with parameters
patches             from images to tokens, and merging of tokens
text                from tokens to embeddings, and the blocks of GPT and RoBERTa
text_heads          heads for masked words and for classes
cross_entropy       the loss over a long vocabulary, in pieces
"""
