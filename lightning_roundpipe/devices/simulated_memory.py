"""Memory of a simulated device, counted by storage: what is held, the most that was, and when it may be used again."""

import threading
from collections import Counter, deque
from collections.abc import Hashable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_roundpipe.devices.simulated_streams import Moment, SimulatedStream, StreamOrderError, Uses


class BlockCache:
    """Blocks of an allocator that keeps what is freed, as those of CUDA do, and gives it out again.

    It is stricter than they are: a block is only given out for the very same size.

    Attributes:
        new: How many blocks it has had to ask the system for.
    """

    def __init__(self) -> None:
        self.new = 0
        self._kept: Counter[Hashable] = Counter()

    def take(self, kind: Hashable) -> None:
        """Gives out a block of a kind."""
        if self._kept[kind]:
            self._kept[kind] -= 1
        else:
            self.new += 1

    def give_back(self, kind: Hashable) -> None:
        """Keeps a block that is free."""
        self._kept[kind] += 1


class Block:
    """The memory of one storage. It is free as soon as no tensor holds it any more."""

    __slots__ = ("__weakref__", "_memory", "_storage", "nbytes", "recorded", "stream", "uses")

    def __init__(self, memory: "SimulatedMemory", data: Tensor, stream: SimulatedStream) -> None:
        self._memory = memory
        self._storage = (
            data.untyped_storage() if data.layout == torch.strided else None
        )  # so nobody else gets its place
        self.nbytes = 0
        self.stream = stream
        self.uses = Uses()
        self.recorded: set[SimulatedStream] = set()
        """Streams whose uses the allocator was told of (``record_stream``)."""
        memory.allocate(_nbytes(data), stream)
        self.nbytes = _nbytes(data)

    def follow(self, data: Tensor) -> None:
        """After an operation that may have given the storage another size."""
        nbytes = _nbytes(data)
        if nbytes != self.nbytes:
            self._memory.allocate(nbytes, self.stream, instead_of=self.nbytes)
            self.nbytes = nbytes

    def __del__(self) -> None:  # anywhere, at any time: only notes that it is free
        self._memory.freed.append((self.nbytes, self.stream, self.uses.moments(), self.recorded))


class SimulatedMemory:
    """One device's memory.

    Args:
        device: The device's name.
        capacity: Bytes, or None for as much as the host has.

    Attributes:
        blocks: What an allocator would have had to ask the device for. Blocks are kept for the stream that they are of.
    """

    def __init__(self, device: str, capacity: int | None) -> None:
        self.capacity = capacity
        self.blocks = BlockCache()
        self.freed: deque[tuple[int, SimulatedStream, list[Moment], set[SimulatedStream]]] = deque()
        self._device = device
        self._lock = threading.RLock()
        self._live = self._peak = 0
        self._by_storage: WeakValueDictionary[int, Block] = WeakValueDictionary()
        self._waiting: list[tuple[int, SimulatedStream, list[Moment], set[SimulatedStream]]] = []
        """What streams may still be at work with: with the allocator's knowledge it stays held, without it is free."""

    @property
    def live(self) -> int:
        """Bytes that are held now."""
        with self._lock:
            self._take_back()
            return self._live

    @property
    def peak(self) -> int:
        """The most bytes that were held at a time."""
        return self._peak

    def reset_peak(self) -> None:
        """Begins to look for the most anew."""
        with self._lock:
            self._peak = self.live

    def block_of(self, data: Tensor, stream: SimulatedStream) -> Block:
        """The memory that a tensor's data lies in. What is new is allocated for the stream.

        Raises:
            torch.OutOfMemoryError: When it is more than the device has left.
            StreamOrderError: When it may be memory that another stream is still at work with.
        """
        if data.layout != torch.strided:
            return Block(self, data, stream)
        key = data.untyped_storage()._cdata
        block = self._by_storage.get(key)
        if block is None:
            block = self._by_storage[key] = Block(self, data, stream)
        return block

    def knows(self, data: Tensor) -> bool:
        """Whether a tensor's data lies in memory that is held already."""
        return data.layout == torch.strided and data.untyped_storage()._cdata in self._by_storage

    def allocate(self, nbytes: int, stream: SimulatedStream, *, instead_of: int = 0) -> None:
        """Counts a block of so many bytes, which may be in another one's place."""
        with self._lock:
            self._take_back()
            more = nbytes - instead_of
            if more > 0:
                self._check_reuse(stream)
            if self.capacity is not None and self._live + more > self.capacity:
                raise torch.OutOfMemoryError(
                    f"{self._device} out of memory (as in 'CUDA out of memory'). Tried to allocate {more} bytes."
                    f" It has a capacity of {self.capacity} bytes, of which {self._live} are in use and"
                    f" {self.capacity - self._live} free."
                )
            self._live += more
            self._peak = max(self._peak, self._live)
            if instead_of:
                self.blocks.give_back((stream, instead_of))
            if nbytes:
                self.blocks.take((stream, nbytes))

    def _take_back(self) -> None:
        """Counts what is free by now."""
        while self.freed:
            nbytes, stream, moments, recorded = self.freed.popleft()
            pending = [moment for moment in moments if not stream.follows(moment)]
            if pending:
                self._waiting.append((nbytes, stream, pending, recorded))
            if not any(moment[0] in recorded for moment in pending):
                self._free(nbytes, stream)
        still = []
        for nbytes, stream, moments, recorded in self._waiting:
            pending = [moment for moment in moments if not stream.follows(moment)]
            if any(moment[0] in recorded for moment in moments) and not any(m[0] in recorded for m in pending):
                self._free(nbytes, stream)
            if pending:
                still.append((nbytes, stream, pending, recorded))
        self._waiting = still

    def _free(self, nbytes: int, stream: SimulatedStream) -> None:
        self._live -= nbytes
        if nbytes:
            self.blocks.give_back((stream, nbytes))

    def _check_reuse(self, stream: SimulatedStream) -> None:
        for _, owner, moments, recorded in self._waiting:
            for user, _ in moments:
                if owner is stream and user not in recorded:
                    self._waiting = []
                    raise StreamOrderError(
                        f"Memory of {stream.name} was freed while {user.name} may still use it, and may be used again"
                        f" now. Let {stream.name} wait for an event recorded there after the use, before the tensor"
                        " goes, or call record_stream."
                    )


def _nbytes(data: Tensor) -> int:
    if data.layout == torch.sparse_coo:
        return data._values().nbytes + data._indices().nbytes
    return data.untyped_storage().nbytes()
