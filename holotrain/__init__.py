"""holotrain trains transformers whose activations do not fit in memory, at close to the speed of those that do."""

__version__ = "0.1.0"
