"""A device with memory of its own. Parameters are in host memory, and kept inputs where it has no room for them; what a
call needs is copied up.

The host only hands out work, to streams of the device: one computes, one brings parameters up, one brings inputs up
(which so need not queue behind a stage's parameters), one brings things down. Where devices reach one another, what
goes from one to another does so past the host, by two more streams: of what goes, and of what comes. The one that
computes is the program's own: whatever the user's code does with a tensor of the device, on the main thread, too, comes
after what made it, and libraries that keep memory for each stream need it once. Who needs what another stream makes, or
the memory that it uses, waits for an event of that stream, never for the device:

- computing waits for what it takes to be up, and what is brought down to be computed;
- parameters have two slots. The next stage's come up while one computes: the host is at most two stages ahead. A slot
  is used again when the calls of its stage are done;
- an input's memory, up or on its way down, is used again when the call after its own begins;
- gradients of a stage are computed when those of the stage before are down;
- what comes down has an event that the host waits for before it reads it (:func:`arrived`);
- what goes to another device is copied when it is computed; the other one computes when it is there, and this one, too,
  where it may be changed in place.

A copy from or to host memory that is not pinned lets the host wait: parameters and inputs go up by pinned copies, and
what comes down, comes to pinned memory, as far as memory may be pinned (:class:`Pinning`).
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.base import Device, Event, Hardware, Stopwatch, Stream, arrival, arrived
from lightning_roundpipe.devices.cpu import copy_with_strides
from lightning_roundpipe.devices.file_pages import is_on_file, release_file_pages
from lightning_roundpipe.devices.pinned import Pinning, dense_strides
from lightning_roundpipe.devices.stream_waits import StreamWaits

PIECE = 32 * 10**6
"""Bytes. Larger parameters go up in pieces, between which copies of other streams take their turn."""
STREAMS = ("compute", "parameters up", "inputs up", "down", "to others", "from others")
"""What each stream of a device does."""
_HOST = torch.device("cpu")


class AcceleratorDevice(Device):
    """Runs its calls on an accelerator.

    Args:
        hardware: The accelerator.
        peers: All devices of the pipeline, by where their tensors are. This one joins them.
        pinning: Which host memory is pinned; by default all that is copied from and to.
        times_uploads: Whether it is measured how long computing waits for uploads.
    """

    shares_host_generator = True

    def __init__(
        self,
        hardware: Hardware,
        peers: "dict[torch.device, AcceleratorDevice]",
        *,
        pinning: Pinning | None = None,
        times_uploads: bool = False,
    ) -> None:
        super().__init__()
        self.hardware: Hardware = hardware
        self.pinning = pinning or Pinning()
        self.name = hardware.name
        self.torch_device = hardware.torch_device
        self.autocast = hardware.autocast
        self._peers = peers
        peers[self.torch_device] = self
        self._compute: Stream = hardware.current_stream
        self._parameters: Stream = hardware.stream("the parameters' upload stream")
        self._inputs: Stream = hardware.stream("the inputs' upload stream")
        self._downloads: Stream = hardware.stream("the download stream")
        self._outgoing: Stream = hardware.stream("the stream to others")
        self._incoming: Stream = hardware.stream("the stream from others")
        self._reached: dict[torch.device, bool] = {}
        """What is known of others' places."""
        now: Event = self._compute.record_event()
        self._stage: Hashable = None
        self._slots: list[dict[int, tuple[Tensor, Tensor]]] = [{}, {}]
        """For each of the last two stages its parameters, by id, and what stands for them here."""
        self._stages_begun: list[Event] = [now, now]
        """When the last two stages began, and so those before them were done."""
        self._calls_begun: tuple[Event, ...] = (now,)
        """Likewise for the last call: of computing, and of what goes from here."""
        self._uploaded: Event = now
        self._gradients_down: Event = now
        self._gradients_before: Event = now
        """The last gradients of earlier stages."""
        self._stopwatch = hardware.stopwatch(self._compute)
        """That of the last call."""
        self._held_before = hardware.held_memory()
        """Bytes that are not the pipeline's."""
        self._waits = StreamWaits(partial(hardware.timestamp, self._compute)) if times_uploads else None

    @property
    def upload_wait_seconds(self) -> float | None:
        return None if self._waits is None else self._waits.seconds

    @property
    def peak_memory(self) -> int | None:
        return self.hardware.peak_memory()

    @property
    def streams(self) -> dict[str, Stream]:
        """By what they do."""
        streams = self._compute, self._parameters, self._inputs, self._downloads, self._outgoing, self._incoming
        return dict(zip(STREAMS, streams, strict=True))

    # -- order -----------------------------------------------------------------------------------------------------

    def begin_call(self, stage: Hashable) -> None:
        for event in self._calls_begun:  # nothing of the call before the last is in use any more
            self._compute.wait_event(event)
            self._inputs.wait_event(event)
        streams = self._compute, self._downloads, self._outgoing
        self._calls_begun = tuple(stream.record_event() for stream in streams)
        if stage != self._stage:
            self._stage = stage
            self._begin_stage()

    def _begin_stage(self) -> None:
        before, last = self._stages_begun
        before.synchronize()  # the host is at most two stages ahead
        if self._waits is not None:
            self._waits.collect()
        self._free_slot(last)
        self._stages_begun = [last, self._compute.record_event()]
        self._gradients_before = self._gradients_down

    def _free_slot(self, done: Event) -> None:
        """The older slot is for the new stage."""
        self._parameters.wait_event(done)
        self._slots = [self._slots[1], {}]

    def begin_gradients(self) -> None:
        self.compute_after(self._gradients_before)

    def compute_after(self, event: Event) -> None:
        """Computing goes on after the event: what it changes in place is read before, say."""
        self._stopwatch.leave_out(partial(self._compute.wait_event, event))

    def outlasting(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device == self.torch_device:
                _used_by(self._compute, tensor)

    def stopwatch(self) -> Stopwatch:
        self._stopwatch = self.hardware.stopwatch(self._compute)
        return self._stopwatch

    def settle(self) -> None:
        for stream in self.streams.values():
            stream.record_event().synchronize()
        if self._waits is not None:
            self._waits.collect()

    def let_go(self) -> None:
        self._slots = [{}, {}]
        self.settle()  # so that it can be used again

    # -- up --------------------------------------------------------------------------------------------------------

    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        slot = self._slots[1]
        missing = [parameter for parameter in parameters if id(parameter) not in slot]
        if missing:
            with self.hardware.on(self._parameters):
                for parameter in missing:
                    staged = not parameter.is_pinned()
                    there = moved_in_pieces(parameter.detach(), self.torch_device, self.pinning, staged=staged)
                    slot[id(parameter)] = parameter, nn.Parameter(there, requires_grad=parameter.requires_grad)
                    if not parameter.requires_grad and _lies_on_file(parameter):
                        release_file_pages([parameter])
            self._uploaded = self._parameters.record_event()
            self._wait_for_upload(self._uploaded)
        return [slot[id(parameter)][1] for parameter in parameters]

    @property
    def uploaded(self) -> Event:
        return self._uploaded

    def reaches(self, place: torch.device) -> bool:
        if place == self.torch_device or place not in self._peers:
            return False
        if place not in self._reached:
            self._reached[place] = self.hardware.reaches(place)
        return self._reached[place]

    def to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.torch_device:
            return tensor
        if not self._comes_across(tensor):
            return self._bring_up(self._kept(tensor))
        there = self._bring_across(tensor)
        self._peers[tensor.device].compute_after(self._incoming.record_event())  # it may be changed in place
        return there

    def _comes_across(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and self.reaches(tensor.device)

    def _bring_across(self, tensor: Tensor) -> Tensor:
        """A copy of what is on another device that this one reaches. By torch's rule that one's present stream copies,
        after this one's present stream, which then waits for it."""
        giver = self._peers[tensor.device]
        giver._outgoing.wait_event(giver._compute.record_event())
        with giver.hardware.on(giver._outgoing), self.hardware.on(self._incoming):
            there = moved(tensor.detach(), self.torch_device, self.pinning)
        _used_by(giver._outgoing, tensor)
        _used_by(self._compute, there)
        self._wait_for_upload(self._incoming.record_event())
        return there

    def _bring_up(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.torch_device:
            return tensor
        if self._comes_across(tensor):
            return self._bring_across(tensor)
        tensor = self.bring_down(tensor)
        if tensor.layout != torch.strided:  # the allocator knows of no stream but the one that it was made in
            with self.running():
                return moved(arrived(tensor).detach(), self.torch_device, self.pinning)
        if (event := arrival(tensor)) is not None:
            self._inputs.wait_event(event)
        with self.hardware.on(self._inputs):  # what is the user's own may be written to at any time
            there = moved(tensor.detach(), self.torch_device, self.pinning, staged=event is None)
        _used_by(self._compute, there)
        self._wait_for_upload(self._inputs.record_event())
        return there

    def _wait_for_upload(self, event: Event) -> None:
        with self._waits.measured() if self._waits is not None else nullcontext():
            self.compute_after(event)

    def send(self, tensor: Tensor, place: torch.device) -> Tensor:
        peer = self._peers.get(place)
        return self.to_host(tensor).to(place) if peer is None else peer._bring_up(tensor)

    # -- down ------------------------------------------------------------------------------------------------------

    def to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device == _HOST:
            return tensor
        return arrived(self.bring_down(tensor))

    def bring_down(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        if tensor.device == _HOST:
            return tensor
        if (peer := self._peers.get(tensor.device)) is None:
            return tensor.detach().to(_HOST)
        with peer.running():
            return peer._bring_down(tensor.detach().clone() if copy else tensor)

    def keep_input(self, tensor: Tensor, *, copy: bool, stays: bool = False) -> Tensor:
        here = tensor.device == self.torch_device
        if stays and (here or not copy) and _is_dense(tensor):
            if not here:
                return self.to_device(tensor)
            if tensor.untyped_storage().nbytes() <= tensor.nbytes:  # of a part, the whole would be held
                with self.running():
                    return tensor.clone() if copy else tensor
        if tensor.device != _HOST:
            return self._kept(tensor) if copy else self.bring_down(tensor)
        tensor = arrived(tensor)
        return copy_with_strides(tensor) if copy else tensor

    def _kept(self, tensor: Tensor) -> Tensor:
        """The tensor of any device, in host memory. Its device computes on when it has come down: it may be changed in
        place."""
        down = self.bring_down(tensor)
        if (peer := self._peers.get(tensor.device)) is not None and (event := arrival(down)) is not None:
            peer.compute_after(event)
        return down

    def release_inputs(self, kept: Iterable[Any]) -> None:
        for tensor in kept:
            if isinstance(tensor, Tensor) and (event := arrival(tensor)) is not None:
                for peer in self._peers.values():
                    peer.compute_after(event)

    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self.pinning.memory(
            like.numel() * dtype.itemsize,
            partial(self.hardware.host_memory, like, dtype),
            partial(torch.empty_strided, like.size(), dense_strides(like), dtype=dtype, device=_HOST),
        )

    def staged(self, tensor: Tensor) -> Tensor:
        return _staged(tensor, self.pinning)

    def _bring_down(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, which is there after an event, or now, if it is not pinned."""
        self._downloads.wait_event(self._compute.record_event())
        with self.hardware.on(self._downloads):
            copy = moved(tensor.detach(), _HOST, self.pinning)
        _used_by(self._downloads, tensor)
        if copy.layout == torch.strided and copy.is_pinned():
            copy.arrival = self._downloads.record_event()  # type: ignore[attr-defined]
        return copy

    def bring_gradient_down(self, gradient: Tensor, memory: Tensor) -> Event:
        """Copies a gradient of this device into host memory, where it is after the event."""
        with self.running():  # of other strides, it would come by memory that is not pinned
            gradient = _with_strides_of(gradient, memory)
        self._downloads.wait_event(self._compute.record_event())
        with self.hardware.on(self._downloads):
            memory.copy_(gradient, non_blocking=memory.is_pinned())
        _used_by(self._downloads, gradient)
        self._gradients_down = self._downloads.record_event()
        return self._gradients_down

    # -- memory ----------------------------------------------------------------------------------------------------

    def total_memory(self) -> int | None:
        return self.hardware.total_memory()

    def free_memory(self) -> int | None:
        return self.hardware.free_memory()

    def most_held(self) -> int:
        parameters = sum(there.nbytes for slot in self._slots for _, there in slot.values())
        most = self.hardware.peak_memory() - self._held_before - parameters
        self.hardware.reset_peak_memory()
        return most

    # -- threads and random numbers --------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[Any]:
        return self.hardware.on(self._compute)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.hardware.in_thread())
            for peer in reversed(self._peers.values()):  # the first one is then the current one
                stack.enter_context(peer.running())
            yield

    def random_state(self) -> Tensor | None:
        return self.hardware.generator.get_state()

    def set_random_state(self, state: Tensor | None) -> None:
        if state is not None:
            self.hardware.generator.set_state(state)

    def seed(self, seed: int) -> None:
        self.hardware.generator.manual_seed(seed)


def _lies_on_file(parameter: Tensor) -> bool:
    """Whether the parameter's memory is a file's, which is looked up once."""
    if not hasattr(parameter, "lies_on_file"):
        parameter.lies_on_file = is_on_file(parameter)  # type: ignore[attr-defined]
    return bool(parameter.lies_on_file)  # type: ignore[attr-defined]


def _used_by(stream: Any, tensor: Tensor) -> None:
    """Its memory is not used for anything else before the stream has done with it."""
    if tensor.layout == torch.strided:  # others are copied while the host waits
        tensor.record_stream(stream)


def _with_strides_of(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, or a copy of it on its device, with the other's strides."""
    strides = zip(tensor.size(), tensor.stride(), other.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in strides):
        return tensor
    like = torch.empty_strided(other.size(), other.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.copy_(tensor)


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy of a host tensor in pinned memory, without gaps. Nobody else writes to it."""
    return (tensor if _is_dense(tensor) and not tensor.is_pinned() else tensor.clone()).pin_memory()


def _is_dense(tensor: Tensor) -> bool:
    """Whether it has no gaps, and a memory of its own for each number."""
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or tensor.stride() == dense_strides(tensor)


def _staged(tensor: Tensor, pinning: Pinning) -> Tensor:
    """What a host tensor goes up from: a pinned copy, or itself, and then the host is to wait until it is there."""
    return pinning.memory(tensor.nbytes, partial(pinned_copy, tensor), lambda: tensor)


def moved(tensor: Tensor, device: torch.device, pinning: Pinning, *, staged: bool = False) -> Tensor:
    """A copy on another device with the same strides: what looks at a tensor's layout must see the same there.

    Args:
        tensor: What is copied. The host does not wait for it, unless it has to make strides with gaps, or what is in
            host memory may not be pinned.
        device: Where to.
        pinning: Which host memory is pinned.
        staged: Whether it goes by a pinned copy: it may be written to before it is there, or is not pinned itself.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.to(device)
    repeated = [dim for dim in range(tensor.dim()) if tensor.stride(dim) == 0 and tensor.size(dim) > 1]
    if repeated:
        once = tensor
        for dim in repeated:
            once = once.narrow(dim, 0, 1)
        return moved(once, device, pinning, staged=staged).expand(tensor.size())
    if device == _HOST:  # where torch pins what it does not wait for
        copy = pinning.memory(tensor.nbytes, lambda: tensor.to(device, non_blocking=True), lambda: tensor.to(device))
    else:
        source = _staged(tensor, pinning) if staged else tensor
        copy = source.to(device, non_blocking=not staged or source is not tensor)
    if copy.stride() == tensor.stride() or tensor.numel() == 0:
        return copy
    if device == _HOST:
        copy = tensor.to(device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).copy_(copy)


def moved_in_pieces(tensor: Tensor, device: torch.device, pinning: Pinning, *, staged: bool) -> Tensor:
    """As :func:`moved`, for what goes up from host memory. If it is large it goes in pieces, each by a pinned copy."""
    if tensor.nbytes <= PIECE or tensor.layout != torch.strided or tensor.stride() != dense_strides(tensor):
        return moved(tensor, device, pinning, staged=staged)
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    flat, flat_copy = (each.as_strided((each.numel(),), (1,)) for each in (tensor, copy))
    for start, stop in pieces(tensor.numel(), max(1, PIECE // tensor.element_size())):
        piece = flat[start:stop]
        source = _staged(piece, pinning) if staged else piece
        flat_copy[start:stop].copy_(source, non_blocking=not staged or source is not piece)
    return copy


def pieces(length: int, most: int) -> list[tuple[int, int]]:
    """Where each piece starts and stops if so many elements are cut into the fewest pieces of at most `most`, of sizes
    that are as equal as can be."""
    count = max(1, -(-length // most))
    bounds = [length * i // count for i in range(count + 1)]
    return list(pairwise(bounds))
