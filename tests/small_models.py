"""Arguments of a model of each family that takes milliseconds."""

IMAGE = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 5, "dim": 16, "depth": 2, "heads": 2}
WINDOWS = {
    "image_size": 8,
    "patch_size": 2,
    "channels": 1,
    "classes": 5,
    "dim": 8,
    "depths": (2, 1),
    "heads": (1, 2),
    "window": 2,
}
POOLED = {"image_size": 8, "channels": 1, "classes": 5, "dim": 8, "depths": (2, 2), "heads": 1, "kv_stride": 2}
TEXT = {"vocab": 40, "context": 12, "dim": 16, "depth": 2, "heads": 2}

CELLS = {"image_size": 8, "channels": 1, "classes": 5, "width": 4, "depth": 3}

FAMILIES = {"ViT": IMAGE, "Swin": WINDOWS, "MViT": POOLED, "GPT": TEXT, "RoBERTa": TEXT}
"""Arguments of the smallest model of each family of transformers; the reversible one takes the same."""

TRANSFORMERS = [f"{prefix}{family}" for family in FAMILIES for prefix in ("", "Rev")]
