"""What holds for every test: one thread per operation, fixed seeds, quiet Lightning, and no thread left behind."""

import gc
import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from helpers import SIMULATED
from hypothesis import settings
from lightning.fabric.utilities import registry

from lightning_roundpipe.garbage import collect

torch.set_num_threads(1)
if SIMULATED:  # the CPU has a kernel of its own for attention, which rounds otherwise
    torch.backends.cuda.enable_flash_sdp(False)
# Every Trainer looks through all installed packages for callbacks of theirs, which takes most of its construction.
registry.entry_points = cache(registry.entry_points)
# How long an example takes depends on what else the machine does.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")
# A shell lets what it starts in the background ignore Ctrl-C, and Python would go on to.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def fast_garbage_collection() -> None:
    """What was imported, and what tests before have left in caches, is not looked through in every collection: there
    are so many in a pipeline's life that a test would take twice as long in the end."""
    collect()  # all: what is garbage now would stay for ever
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_start() -> Iterator[None]:
    """The same seed, default dtype and Ctrl-C handler for every test, whatever ran before it."""
    torch.manual_seed(0)
    dtype, handler = torch.get_default_dtype(), signal.getsignal(signal.SIGINT)
    yield
    torch.set_default_dtype(dtype)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores SIGINT after a KeyboardInterrupt


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No thread of a pipeline may outlive the test that started it."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("roundpipe")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*have no `val_dataloader`.*")  # most tests only train
        warnings.filterwarnings("ignore", ".*virtual devices share.*")
        yield
    logger.setLevel(level)
