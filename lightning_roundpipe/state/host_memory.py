"""What the first batch needed more than the others goes back to the system."""

import ctypes

_WORTH_IT = 2**26


def give_back_surplus(surplus: int) -> None:
    """Gives memory that is free, but kept by the C library for later, back to the system. Where there is no such call
    (it is glibc's own), nothing happens.

    Args:
        surplus: How many bytes are no longer needed. It takes some milliseconds, which few bytes are not worth.
    """
    if surplus < _WORTH_IT:
        return
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; TypeError: Windows knows no program by None
        return
    malloc_trim(0)
