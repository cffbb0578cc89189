"""Spares Python's garbage collector the objects that were there before training."""

import gc


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
