"""The version, in a separate file so that it can be read without importing torch."""

__version__ = "0.1.0"


def later_version(what: str, release: object = "", formats: tuple[int, int] | None = None) -> str:
    """Return the message that `what` was written by a later version of pwlu.

    Args:
        what: the file, with its name.
        release: the version that wrote it, if known.
        formats: the format it has, and the latest format that this version reads.
    """
    written = f", pwlu {release}" if release else " of pwlu"
    read = f", in format {formats[0]}. This is pwlu {__version__}, which reads formats up to {formats[1]}" if formats else ""
    return f"{what} was written by a later version{written}{read or f'. This is pwlu {__version__}'}: update it to read that"
