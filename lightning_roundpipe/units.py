"""Numbers of bytes, in the units of GPUs' data sheets and of the metrics: powers of 1000."""

from typing import SupportsFloat

GB = 10**9


def size_text(nbytes: SupportsFloat) -> str:
    """A number of bytes for a message, with three digits: ``1.5 GB``."""
    size = float(f"{float(nbytes):.3g}")
    units = ["TB", "GB", "MB", "kB", "bytes"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:,.0f} {units[-1]}" if size >= 1000 else f"{size:.3g} {units[-1]}"
