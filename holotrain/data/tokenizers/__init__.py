"""Text to token ids and back.

tokenizer   the interface
byte        bytes as tokens
subword     a trained BPE, or any tokenizer.json, with the tokenizers library
restored    tokenizers by name, and from their JSON
"""

from holotrain.data.tokenizers.byte import ByteTokenizer
from holotrain.data.tokenizers.restored import known_tokenizer, tokenizer_from_json
from holotrain.data.tokenizers.tokenizer import Tokenizer, utf8

__all__ = ["ByteTokenizer", "Tokenizer", "known_tokenizer", "tokenizer_from_json", "utf8"]
