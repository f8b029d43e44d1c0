"""Files for tests of readers."""

import gzip


def write(path, text):
    """Write a text, packed where the name says so; return the path as text."""
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)
