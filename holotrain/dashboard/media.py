"""Reads the last image and text of each tag of a run.

Event files are data that may come from anywhere. So only PNG and JPEG are read, recognised by their first bytes, and sizes are
limited; the page shows texts as plain text.
"""

from base64 import b64encode
from dataclasses import dataclass

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""Kinds of images by their first bytes."""

TAGS, IMAGE_BYTES, CHARACTERS = 12, 2**20, 10_000
"""Limits for each run: tags of images and of texts; the size of an image, which is left out if larger; the length of a text."""


@dataclass
class Medium:
    """An image or a text of a run.

    Args:
        step: at which it was logged.
        content: the text, or the image as a ``data:`` URI.
    """

    step: int
    content: str


def read_images(events: EventAccumulator | None) -> dict[str, Medium]:
    """The last image of each tag. Images that are too large or of another kind are left out."""
    found = {}
    for tag in sorted(events.Tags()["images"]) if events else ():
        last = events.Images(tag)[-1:]
        uri = image_uri(last[0].encoded_image_string) if last else None
        if uri is not None:
            found[tag] = Medium(last[0].step, uri)
    return dict(list(found.items())[:TAGS])


def image_uri(image: bytes) -> str | None:
    """None if it is too large, or neither PNG nor JPEG."""
    kind = next((kind for start, kind in KINDS.items() if image.startswith(start)), None)
    return f"data:{kind};base64,{b64encode(image).decode()}" if kind and len(image) <= IMAGE_BYTES else None


def read_texts(events: EventAccumulator | None) -> dict[str, Medium]:
    """The last text of each tag, cut after ``CHARACTERS``."""
    found = {}
    for tag in sorted(events.Tags()["tensors"]) if events else ():
        about, last = events.summary_metadata.get(tag), events.Tensors(tag)[-1:]
        if about is not None and about.plugin_data.plugin_name == "text" and last and last[0].tensor_proto.string_val:
            text = "\n".join(part.decode("utf-8", errors="replace") for part in last[0].tensor_proto.string_val)
            text = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}\n... ({len(text) - CHARACTERS:,} more characters)"
            found[tag.removesuffix("/text_summary")] = Medium(last[0].step, text)
    return dict(list(found.items())[:TAGS])
