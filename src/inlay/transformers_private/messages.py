"""Private parts of transformers: the wording of its errors."""

__all__ = ["asks_for_trust", "gist"]


def asks_for_trust(error: Exception) -> bool:
    """Return whether loading failed because the model comes with code of its own.

    transformers 4.18 names the option in the message and raises a plain ValueError. If the wording
    changes, the error is shown as transformers words it.
    """
    return "trust_remote_code" in str(error)


def gist(error: Exception) -> str:
    """Return the first line of an error: transformers continues with advice for others.

    transformers 4.0; a message of one line stays whole.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
