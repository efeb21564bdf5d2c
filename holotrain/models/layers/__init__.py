"""What the families of models are made of.

branches            attention and MLP: the two branches of every block
attention           multi-head self-attention, with rotary (positions) and kv_cache (generation)
windows             attention within shifted windows, Swin's
pooling_attention   attention among pooled tokens, MViT's
residual            the sequence of blocks of a plain transformer (the reversible one is holotrain.reversible's)
streams             reversible blocks between one stream and one stream
stages              options that count blocks, in models of several such sequences
fusion              two streams to one, with parameters
patches             images to tokens, and fewer tokens of more channels
text                tokens to embeddings, and the blocks of GPT and RoBERTa
text_heads          what reads an encoded text
cross_entropy       the loss over a long vocabulary, in pieces
"""
