"""Images in files, one folder per class, as torchvision's ImageFolder reads them."""

from pathlib import Path

from torchvision.datasets import ImageFolder

from pwlu.lab.recipes.settings import UserError


class Folder:
    """The images of a folder with one folder per class."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            parent = root.parent
            raise UserError(
                f"no images at {root}. Expected {parent}/train/CLASS/*.jpg and {parent}/val/CLASS/*.jpg, as torchvision's "
                "ImageFolder reads them. Write --data DIR with the right folder, or --data 'NAME-{000..146}.tar'"
            )
        try:
            found = ImageFolder(str(root))
        except FileNotFoundError as error:
            raise UserError(f"{root} must have one folder of images per class: {error}") from None
        self.samples, self.classes = found.samples, found.classes

    def __len__(self) -> int:
        return len(self.samples)

    def image(self, number: int) -> tuple[str, int]:
        """Return the path of an image, and its label."""
        return self.samples[number]

    def name(self, number: int) -> str:
        """Return the name of an image for messages."""
        return self.samples[number][0]
