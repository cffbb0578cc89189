"""What Python's garbage collector is to do, and what it is spared."""

import gc


def collect() -> None:
    """Frees what only cycles of objects hold, those through autograd's graphs in C++ included."""
    for _ in range(3):  # such a graph lets go of the next cycle only when it is gone itself
        gc.collect()


class SparedObjects:
    """What is there now is not looked through in garbage collections, until it is released.

    Layer calls make so many objects that there is a full collection every few batches. It looks at every object, and
    with torch and Lightning imported takes up to half a second, in which no device is given any work. Where the program
    spares objects by itself (``gc.freeze``) nothing is done.
    """

    def __init__(self) -> None:
        self._ours = gc.isenabled() and not gc.get_freeze_count()
        if self._ours:
            gc.collect()  # what is garbage already must not be kept
            gc.freeze()

    def release(self) -> None:
        if self._ours:
            gc.unfreeze()
        self._ours = False
