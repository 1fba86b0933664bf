"""Read an image file as 8-bit RGB."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

_SIXTEEN_BITS = ("PNG", "PPM")  # Pillow stores their 16-bit integers, 0 to 65535, in 32 bits


class UnreadableImage(Exception):
    """Raised if a file is not an image, is truncated, is too large, or has values of unknown range."""


def read_image(file: str | Path | BinaryIO) -> Image.Image:
    """Return an image in mode RGB, or raise :class:`UnreadableImage`.

    16-bit greyscale values are divided by 257, so that 65535 becomes 255. (Pillow would clip them to 255, and most images of
    microscopes would be white.) 32-bit values are an error, because their range is unknown. The rotation in EXIF data is
    ignored, because annotations refer to the image without it.
    """
    try:
        with Image.open(file) as image:
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
                image.load()
                return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
            if image.mode in ("I", "F"):
                raise UnreadableImage("its values have 32 bits and an unknown range: save it with 8 or 16 bits")
            return image.convert("RGB")
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:  # from Pillow
        raise UnreadableImage(str(error)) from None
