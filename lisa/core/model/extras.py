"""Packages that only an extra of the distribution installs, as in `lisa-delay-queue[gateway]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lisa.core.model.errors import MissingExtra


@contextmanager
def requires(extra: str) -> Iterator[None]:
    """Raise MissingExtra if an import in the block finds a package of other authors missing.

    Of nested blocks, the outermost names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "lisa"):
            raise
        raise MissingExtra(
            f"{package} is not installed: pip install 'lisa-delay-queue[{extra}]'", name=package
        ) from None
