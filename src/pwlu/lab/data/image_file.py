"""One image from a file, as networks take it: red, green and blue, of 8 bits each."""

from pathlib import Path

import numpy as np
from PIL import Image

_SIXTEEN_BITS = ("PNG", "PPM")  # formats whose whole numbers are from 0 to 65535, where Pillow holds them in 32 bits


class Unreadable(Exception):
    """No image, half of one, too large a one, or one whose numbers have no known range."""


def read_image(path: str | Path) -> Image.Image:
    """An image in mode RGB, or an error of :class:`Unreadable`.

    Pillow takes what is above 255 for 255: grey of 16 bits, as microscopes give it, would be white. It is divided by 257, so
    that 65535 is 255. What 32 bits mean, whole numbers or floating point, no file says. The rotation that a camera notes (EXIF)
    is not done: annotations are for the image without it.
    """
    try:
        with Image.open(path) as file:
            if file.mode.startswith("I;16") or (file.mode == "I" and file.format in _SIXTEEN_BITS):
                file.load()
                return Image.fromarray((np.asarray(file) // 257).astype(np.uint8)).convert("RGB")
            if file.mode in ("I", "F"):
                raise Unreadable("its numbers have 32 bits, and no known range: save it with 8 or 16 bits")
            return file.convert("RGB")
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:  # Pillow's, of damaged files
        raise Unreadable(str(error)) from None
