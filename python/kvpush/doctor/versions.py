"""Versions of installed distributions, without importing them."""

import importlib.metadata


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, else ``None``."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
