"""A simulated accelerator, for tests and planning on machines without any.

Tensors live on "device k" (``meta:k``): their values are in host memory, but as on a real device no operation takes
tensors of two devices, memory is counted and limited, copies are counted, and what one stream does is not there for
another one that has not waited for it. Every operation is computed by the CPU's kernels, so its numbers are the CPU's,
but where torch itself goes another way on the CPU: in attention, unless its "math" is asked for, and recurrent layers.

    device = SimulatedDevice(3, capacity=2**30)
    with simulating():
        x = torch.randn(4, 4, device=device.torch_device, requires_grad=True)
        (x @ x.T).sum().backward()
        x + torch.ones(4, 4)        # raises DeviceMixError
    device.memory.peak              # bytes
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from weakref import WeakValueDictionary, finalize

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.devices.base import Mark
from lightning_roundpipe.devices.pinned import dense_strides
from lightning_roundpipe.devices.simulated_autocast import KEYS, autocast_as_on_the_host, watching_casts
from lightning_roundpipe.devices.simulated_links import Link
from lightning_roundpipe.devices.simulated_memory import Block, BlockCache, SimulatedMemory
from lightning_roundpipe.devices.simulated_random import keep_random_states
from lightning_roundpipe.devices.simulated_streams import SimulatedEvent, SimulatedStream, Uses, current_stream
from lightning_roundpipe.devices.stopwatch import HostStopwatch

_aten = torch.ops.aten
_thread = threading.local()
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class DeviceMixError(RuntimeError):
    """An operation was given tensors of several devices, or of a device and the host."""


@dataclass(slots=True)
class Copies:
    """Copies of one kind.

    Attributes:
        count: Their number.
        nbytes: Their bytes.
        seconds: How long they took, by the device's bandwidth and latency.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class SimulatedDevice:
    """One device. A second one with the same index takes the first one's place in the process.

    Args:
        index: Its number: its tensors are on ``meta:index``.
        capacity: Bytes of memory, or None for as many as the host has.
        bandwidth: Bytes per second of its links (to the host, from the host, from other devices), or None where copies
            take no time. On a link they are made one at a time, and streams take turns.
        latency: Seconds that each copy takes besides.
        peer_access: Whether it and others of which that is true reach one another without the host.
        pinnable: Bytes of host memory that the system lets be pinned at a time, or None where it sets no limit. The
            least of all devices' counts.

    Attributes:
        memory: What is held.
        up: Copies from the host.
        down: Copies to the host.
        across: Copies from other devices.
        waits: How often the host has waited within an operation: for a result, a copy that was not to be
            ``non_blocking``, or one from or to host memory that is not pinned or lies otherwise.
        generator: Its random number generator; the CPU's algorithm.
        autocast: The kind of device whose autocast is in force.
    """

    autocast = "cpu"

    def __init__(
        self,
        index: int,
        *,
        capacity: int | None = None,
        bandwidth: float | None = None,
        latency: float = 0.0,
        peer_access: bool = False,
        pinnable: int | None = None,
    ) -> None:
        self.index = index
        self.torch_device = torch.device("meta", index)
        self.name = str(self.torch_device)
        self.bandwidth = bandwidth
        self.latency = latency
        self.peer_access = peer_access
        self.pinnable = pinnable
        self.memory = SimulatedMemory(self.name, capacity)
        self.up, self.down, self.across = Copies(), Copies(), Copies()
        self.links = {"up": Link(), "down": Link(), "across": Link()}
        self.waits = 0
        self.generator = torch.Generator().manual_seed(0)
        self.default_stream = SimulatedStream(self.name, "the default stream")
        _devices[index] = self
        keep_random_states(_generators)
        autocast_as_on_the_host(SimulatedTensor)

    def stream(self, name: str = "a stream") -> SimulatedStream:
        """A new stream."""
        return SimulatedStream(self.name, name)

    def on(self, stream: SimulatedStream) -> AbstractContextManager[Any]:
        """Within it, this thread's operations go to a stream."""
        return stream

    def timestamp(self, stream: SimulatedStream) -> SimulatedEvent:
        """When a stream has done its work so far, by the modelled durations."""
        return stream.record_event()

    def in_thread(self) -> AbstractContextManager[None]:
        """Around what a thread does with its tensors."""
        return simulating()

    def reaches(self, other: torch.device) -> bool:
        """Whether both have access to their peers."""
        return self.peer_access and _is_simulated(other) and simulated_device(other).peer_access

    def total_memory(self) -> int | None:
        """Its capacity."""
        return self.memory.capacity

    def free_memory(self) -> int | None:
        """What is left of it."""
        return None if self.memory.capacity is None else self.memory.capacity - self.memory.live

    def held_memory(self) -> int:
        """The bytes that tensors hold."""
        return self.memory.live

    def peak_memory(self) -> int:
        """The most bytes that they have held since :meth:`reset_peak_memory`."""
        return self.memory.peak

    def reset_peak_memory(self) -> None:
        """Begins to look for the most anew."""
        self.memory.reset_peak()

    def mark(self, stream: SimulatedStream) -> Mark:
        """Marks the end of what a stream was given so far: that is done at once, in the time that the host takes."""
        now = time.perf_counter()
        return lambda: now

    @property
    def current_stream(self) -> SimulatedStream:
        """The stream that this thread's operations go to."""
        return current_stream(self.name) or self.default_stream

    def stopwatch(self, stream: SimulatedStream) -> HostStopwatch:
        """For the work of a stream: by the host's clock, for the host does it."""
        return HostStopwatch()

    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor of this shape and these strides that counts as pinned."""
        _check_pinnable(like.numel() * dtype.itemsize)
        return _note_pinned(torch.empty_strided(like.size(), dense_strides(like), dtype=dtype, device="cpu"))

    def synchronize(self) -> None:
        """The host waits for the present stream and the default one."""
        self.current_stream.synchronize()
        self.default_stream.synchronize()

    def count(self, way: Literal["up", "down", "across"], nbytes: int, stream: SimulatedStream) -> None:
        """Counts a copy, and lets it take its time on a stream."""
        copies: Copies = getattr(self, way)
        seconds = self.latency + (nbytes / self.bandwidth if self.bandwidth else 0.0)
        copies.count += 1
        copies.nbytes += nbytes
        copies.seconds += seconds
        stream.copy_on(self.links[way], seconds)

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self.name}>"


_devices: dict[int, SimulatedDevice] = {}


def _generators() -> dict[int, torch.Generator]:
    """Those that exist for this thread."""
    if not getattr(_thread, "simulating", False):
        return {}
    return {index: device.generator for index, device in _devices.items()}


def simulated_device(device: torch.device) -> SimulatedDevice:
    """The device with an index; made, without limits, where there is none yet."""
    assert device.type == "meta" and device.index is not None
    found = _devices.get(device.index)
    return SimulatedDevice(device.index) if found is None else found


class SimulatedTensor(Tensor):
    """A tensor on a simulated device."""

    data_on_host: Tensor
    home: SimulatedDevice
    block: Block

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, home: SimulatedDevice) -> "SimulatedTensor":
        strided = data.layout == torch.strided
        place: dict[str, Any] = {"strides": data.stride(), "storage_offset": data.storage_offset()} if strided else {}
        self: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            **place,
            dtype=data.dtype,
            layout=data.layout,
            device=home.torch_device,
            _extra_dispatch_keys=KEYS,
        )
        self.data_on_host = data
        self.home = home
        self.block = home.memory.block_of(data, home.current_stream)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    # What torch does not do for tensors of this kind by itself, or not as for a device's.

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host"
                " memory first."
            )
        return self.detach().cpu().resolve_conj().resolve_neg().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        return self.data_on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.data_on_host.untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, SimulatedTensor):
            raise RuntimeError(
                f"Attempted to set the data of a tensor on {self.device} to a tensor on {value.device}, which has an"
                " incompatible tensor type."
            )
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.data_on_host, self.home, self.block = value.data_on_host, value.home, value.block

    def new(self, *args: Any, **kwargs: Any) -> Any:
        return self.data_on_host.new(*args, **kwargs).to(self.device)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_index_of_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index_of_tensors(index), value)

    def record_stream(self, stream: Any) -> None:
        """Tells the allocator that a stream uses the tensor."""
        self.block.recorded.add(stream)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.data_on_host.detach())
        return f"{text[:-1]}, device='{self.device}'{', requires_grad=True' if self.requires_grad else ''})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        new = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self.detach().cpu(), self.home.index, self.requires_grad, parameter)


_NUMBERS = (int, numpy.integer, numpy.bool_)


def _index_of_tensors(index: Any) -> Any:
    """An index with host tensors for lists of numbers: for ``meta`` torch makes tensors without values of them."""
    is_one = isinstance(index, list) and all(isinstance(item, _NUMBERS) for item in index)
    if isinstance(index, (tuple, list)) and not is_one:
        return tuple(map(_list_to_tensor, index))
    return _list_to_tensor(index)


def _list_to_tensor(item: Any) -> Any:
    if not _holds_numbers(item):
        return item
    return torch.tensor(item, device="cpu", dtype=None if item else torch.long)


def _holds_numbers(item: Any) -> bool:
    return isinstance(item, (list, tuple, range)) and all(
        isinstance(part, _NUMBERS) or _holds_numbers(part) for part in item
    )


def _rebuild(data: Tensor, index: int, requires_grad: bool, parameter: bool) -> Tensor:
    with simulating():
        tensor = data.to(torch.device("meta", index))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


class _Simulation(TorchDispatchMode):
    """Lets operations on host tensors alone take part: those that make tensors on a device, and those that touch host
    memory which a device's copy reads or writes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _FromData(TorchFunctionMode):
    """Functions that make a tensor of Python's numbers: for ``meta`` torch makes one without values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKE_OF_DATA:
            like = args[0].device if func is Tensor.new_tensor else None
            device = like if kwargs.get("device") is None else torch.device(kwargs["device"])
            if device is not None and _is_simulated(device):
                gradient = kwargs.pop("requires_grad", False)
                made = func(*args, **{**kwargs, "device": "cpu"}).to(device)
                return made.requires_grad_() if gradient else made
        return func(*args, **kwargs)


@contextmanager
def simulating() -> Iterator[None]:
    """In this thread, ``meta:k`` is simulated device k: tensors can be made there and moved there."""
    if getattr(_thread, "simulating", False):
        yield
        return
    _thread.simulating = True
    try:
        with _FromData(), _Simulation(), watching_casts():
            yield
    finally:
        _thread.simulating = False


# --- what an operation does


_MAKE_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_TRANSFERS = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default, _aten.index_put_.default,
            _aten._index_put_impl_.default}  # fmt: skip
"""Their indices may be on the host."""
_TAKE_SCALARS = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
                 _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor, _aten.fill.Tensor, _aten.fill_.Tensor,
                 _aten._foreach_mul.Tensor, _aten._foreach_mul_.Tensor, _aten._foreach_div.Tensor,
                 _aten._foreach_div_.Tensor, _aten._foreach_add.Tensor, _aten._foreach_add_.Tensor}  # fmt: skip
"""They take a host tensor without dimensions as a number; so do all pointwise ones."""
_WAIT_FOR_THE_DEVICE = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default,
                        _aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default,
                        _aten.unique_consecutive.default}  # fmt: skip
"""The host needs their result, or its size."""
_DRAW_NOTHING = {_aten._fused_sdp_choice.default}


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _schema(func).is_foreach:  # below a dispatch mode, torch's own counting of changes does not come about
        torch.autograd.graph.increment_version(args[0])
    on_devices = list(_tensors((*args, *kwargs.values()), SimulatedTensor))
    target = kwargs.get("device")
    goes_to_device = target is not None and _is_simulated(torch.device(target))
    if not on_devices and not goes_to_device:
        if func is _aten.is_pinned.default:
            return _is_pinned(args[0])
        if _host_uses:
            _check_host(func, args, kwargs)
        if func is _aten._pin_memory.default:
            return pinned(args[0])
        return func(*args, **kwargs)
    if func in _TRANSFERS:
        return _copy(func, args, kwargs)
    home = _home(func, args, kwargs, on_devices)
    if func is _aten.is_pinned.default:
        return False
    return _compute(func, args, kwargs, home)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], home: SimulatedDevice) -> Any:
    """Runs an operation of one device."""
    schema = _schema(func)
    stream = home.current_stream
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else home.torch_device
    stream.issue()
    _note_uses(func, schema, args, kwargs, stream)
    of_data: dict[int, SimulatedTensor] = {}
    host_args = _with_data(args, of_data)
    host_kwargs = {key: _with_data(value, of_data) for key, value in kwargs.items()}
    if kwargs.get("device") is not None and _is_simulated(target):
        host_kwargs["device"] = torch.device("cpu")
        host_kwargs.pop("pin_memory", None)
    if schema.draws:
        func, host_args, host_kwargs = _with_generator(func, schema, host_args, host_kwargs, home)
    if func is _aten.histc.default and not host_args[0].is_floating_point():  # the CPU's kernel takes no whole numbers
        result = func(host_args[0].double(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
    else:
        result = func(*host_args, **host_kwargs)
    if func in _WAIT_FOR_THE_DEVICE:
        home.waits += 1
        stream.synchronize()
    for value in _tensors([args[i] for i in schema.written if i < len(args)], SimulatedTensor):
        _follow_data(value, stream)

    return _with_tensors(result, of_data, home if _is_simulated(target) else None)


def _with_data(value: Any, of_data: dict[int, SimulatedTensor]) -> Any:
    """An argument with each tensor's data for the tensor. Notes which is whose."""
    if isinstance(value, SimulatedTensor):
        of_data[id(value.data_on_host)] = value
        return value.data_on_host
    return type(value)(_with_data(item, of_data) for item in value) if type(value) in (list, tuple) else value


def _with_tensors(value: Any, of_data: dict[int, SimulatedTensor], home: SimulatedDevice | None) -> Any:
    """A result with tensors for the data: those that were given, and new ones of the device, if it is of one."""
    if isinstance(value, Tensor):
        if (known := of_data.get(id(value))) is not None:
            return known
        return _made(value, home) if home is not None and value.device.type == "cpu" else value
    return type(value)(_with_tensors(v, of_data, home) for v in value) if type(value) in (list, tuple) else value


def _follow_data(tensor: SimulatedTensor, stream: SimulatedStream) -> None:
    """After an operation on a tensor, which may have given it another shape or other memory."""
    data = tensor.data_on_host
    tensor.block = tensor.home.memory.block_of(data, stream)
    tensor.block.follow(data)
    if data.layout != torch.strided:
        return
    now = data.size(), data.stride(), data.storage_offset()
    if now != (tensor.size(), tensor.stride(), tensor.storage_offset()):
        with no_dispatch():
            Tensor.untyped_storage(tensor).resize_(data.untyped_storage().nbytes())
            _aten.as_strided_.default(tensor, *now)


def _made(data: Tensor, home: SimulatedDevice) -> SimulatedTensor:
    """What the current stream's present work has made."""
    stream, known = home.current_stream, home.memory.knows(data)
    tensor = SimulatedTensor(data, home)
    if not known:
        tensor.block.uses.written = (stream, stream.issued)
    return tensor


@dataclass(frozen=True, slots=True)
class _Schema:
    """What is to be known of an operation."""

    written: tuple[int, ...]
    """The arguments that it writes to, by position."""
    written_by_name: tuple[str, ...]
    draws: bool
    generator: int | None
    pointwise: bool
    is_view: bool
    """Whether it only looks at its argument in another way."""
    is_foreach: bool
    """Whether it changes the tensors of a list, its first argument."""


@cache
def _schema(func: Any) -> _Schema:
    arguments = func._schema.arguments
    writes = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
    return _Schema(
        tuple(writes),
        tuple(arguments[i].name for i in writes),
        torch.Tag.nondeterministic_seeded in func.tags and func not in _DRAW_NOTHING,
        next((i for i, argument in enumerate(arguments) if argument.name == "generator"), None),
        torch.Tag.pointwise in func.tags,
        views and not writes,
        writes == [0] and func._schema.name.startswith("aten::_foreach_"),
    )


def _note_uses(
    func: Any, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], stream: SimulatedStream
) -> None:
    if schema.is_view:  # touches no memory
        return
    written = [args[i] for i in schema.written if i < len(args)]
    written += [kwargs[name] for name in schema.written_by_name if name in kwargs]
    changed = {id(tensor.block): tensor.block for tensor in _tensors(written, SimulatedTensor)}
    for tensor in _tensors((*args, *kwargs.values()), SimulatedTensor):
        if id(tensor.block) not in changed:
            tensor.block.uses.read(stream, func)
    for block in changed.values():
        block.uses.write(stream, func)


def _home(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_devices: Sequence[SimulatedTensor]
) -> SimulatedDevice:
    """The device that an operation belongs to.

    Raises:
        DeviceMixError: When its tensors are not all there.
    """
    if kwargs.get("device") is not None:  # it only looks at the others' shapes
        target = torch.device(kwargs["device"])
        return simulated_device(target) if _is_simulated(target) else on_devices[0].home
    home = on_devices[0].home
    for tensor in on_devices:
        if tensor.home is not home:
            raise _mixed(func, home, tensor)
    if _devices.get(home.index) is not home:
        raise DeviceMixError(f"{func}: the tensor's {home} has been replaced by another one of that index.")
    schema = _schema(func)
    may_be_on_host = {id(index) for index in args[1] if index is not None} if func in _INDEXED else set()
    written = {id(tensor) for tensor in _tensors([args[i] for i in schema.written if i < len(args)], Tensor)}
    for tensor in _tensors((*args, *kwargs.values()), Tensor):
        if isinstance(tensor, SimulatedTensor):
            continue
        on_host = tensor.device.type == "cpu"
        if on_host and id(tensor) in may_be_on_host:
            continue
        is_number = on_host and tensor.dim() == 0 and id(tensor) not in written
        if not (is_number and (schema.pointwise or func in _TAKE_SCALARS)):
            raise _mixed(func, home, tensor)
    return home


def _mixed(func: Any, home: SimulatedDevice, other: Tensor) -> DeviceMixError:
    where = "the host (cpu)" if other.device.type == "cpu" else str(other.device)
    return DeviceMixError(
        f"{func}: expected all tensors to be on the same device, but found at least two devices, {home.name} and"
        f" {where} (a tensor of shape {tuple(other.shape)}). Move one of them with .to(device)."
    )


# --- copies between devices and the host


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_to_copy`` and ``copy_``: what may go from one device to another."""
    makes = func is _aten._to_copy.default
    source: Tensor = args[0] if makes else args[1]
    wanted = kwargs.get("device") if makes else args[0].device
    target = source.device if wanted is None else torch.device(wanted)
    if not (target.type == "cpu" or _is_simulated(target)):  # a tensor without values
        return func(source.to(torch.device("cpu")), *args[1:], **kwargs)
    if target == source.device:
        return _compute(func, args, kwargs, simulated_device(target))
    blocking = not (kwargs.get("non_blocking", False) if makes else args[2] if len(args) > 2 else False)
    makes_pinned = makes and target.type == "cpu" and not blocking  # as real devices do
    if makes_pinned:
        _check_pinnable(source.nbytes)
    giver = simulated_device(source.device) if isinstance(source, SimulatedTensor) else None
    taker = simulated_device(target) if _is_simulated(target) else None
    data = source.data_on_host if isinstance(source, SimulatedTensor) else source
    stream = (giver or taker).current_stream  # type: ignore[union-attr]
    if giver is not None and taker is not None:  # as for CUDA's: the giver copies, and both wait
        stream.wait_stream(taker.current_stream)
    stream.issue()
    if isinstance(source, SimulatedTensor):
        source.block.uses.read(stream, func)
    else:
        _use_host_memory(source, blocking).read(stream, func)
    if makes:
        options = {**kwargs, "device": torch.device("cpu"), "non_blocking": False, "pin_memory": None}
        copied = _placed_like(data, func(data, *args[1:], **options))
        result: Tensor = copied if taker is None else _made(copied, taker)
        if isinstance(result, SimulatedTensor):
            result.block.uses.written = (stream, stream.issued)  # which is the giver's, if there is one
    else:
        result = args[0]
        if isinstance(result, SimulatedTensor):
            result.block.uses.write(stream, func)
            result.data_on_host.copy_(data)
        else:
            copied = func(result, data)
    if taker is None:
        _use_host_memory(result, blocking).write(stream, func)
    # Types are converted on the host.
    nbytes = result.numel() * (result if giver is None else source).element_size()
    if giver is None:
        assert taker is not None
        taker.count("up", nbytes, stream)
    elif taker is None:
        giver.count("down", nbytes, stream)
    else:
        taker.count("across", nbytes, stream)
        taker.current_stream.wait_stream(stream)
    if giver is None or taker is None:
        on_host = result if taker is None else source
        if makes_pinned:
            _note_pinned(on_host)
        on_device = source if taker is None else result
        flows = _is_pinned(on_host) and _lies_as(on_host, on_device)
        (taker or giver).waits += blocking or not flows  # type: ignore[union-attr]
        if blocking:
            stream.synchronize()
    return result


def _lies_as(on_host: Tensor, other: Tensor) -> bool:
    """Whether a copy goes right to or from the host tensor's memory. Else it goes by some that is not pinned."""
    return on_host.is_contiguous() or on_host.stride() == other.stride() == dense_strides(on_host)


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a host tensor in memory that counts as pinned."""
    _check_pinnable(tensor.nbytes)
    return _note_pinned(_placed_like(tensor, tensor.clone()))


def pinned_bytes() -> int:
    """The bytes of host memory that count as pinned now."""
    with _host_uses_lock:
        _forget_host_uses()
    return sum(storage.nbytes() for of in _pinned.valuerefs() if (storage := of()) is not None)


def new_pinned_blocks() -> int:
    """How many blocks of pinned memory an allocator would have had to ask the system for so far."""
    return _pinned_blocks.new


def _check_pinnable(nbytes: int) -> None:
    """Before so many bytes more are pinned.

    Raises:
        RuntimeError: When the system does not allow it.
    """
    limits = [device.pinnable for device in list(_devices.values()) if device.pinnable is not None]
    if limits and pinned_bytes() + nbytes > min(limits):
        raise RuntimeError(f"{nbytes} bytes of host memory cannot be pinned (out of memory, as cudaHostAlloc says)")


def _note_pinned(tensor: Tensor) -> Tensor:
    """The tensor, whose host memory counts as pinned from now on."""
    if tensor.layout == torch.strided:
        storage = tensor.untyped_storage()
        _pinned[storage._cdata] = storage
        with _host_uses_lock:
            while _pinned_freed:
                _pinned_blocks.give_back(_pinned_freed.popleft())
            _pinned_blocks.take(storage.nbytes())
        finalize(storage, _pinned_freed.append, storage.nbytes()).atexit = False
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in _pinned


def _placed_like(source: Tensor, copy: Tensor) -> Tensor:
    """The copy, beginning at as even an address as the source: the CPU's kernels choose their way, and so the last
    bits, by it, and a real device's copies all begin at even ones."""
    if copy.layout != torch.strided or copy.dtype != source.dtype or not copy.numel():
        return copy
    surplus = source.data_ptr() % _ALIGNMENT
    nbytes = copy.untyped_storage().nbytes()
    if surplus == 0 or copy.is_conj() or copy.is_neg():
        return copy
    memory = numpy.empty(nbytes + _ALIGNMENT, dtype=numpy.uint8)
    start = (surplus - memory.ctypes.data) % _ALIGNMENT
    storage = torch.from_numpy(memory[start : start + nbytes]).view(copy.dtype)
    return storage.as_strided(copy.size(), copy.stride()).copy_(copy)


class _HostMemory:
    """Host memory that a device's copy may still be at."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage  # so that nobody else gets its place
        self.uses = Uses()

    @property
    def is_done(self) -> bool:
        """Whether the host knows that no stream is at work with it any more."""
        return all(stream.has_done(number) for stream, number in self.uses.moments())


_host_uses: dict[int, _HostMemory] = {}
_host_uses_lock = threading.Lock()
_SOME_STORAGE = torch.empty(0).untyped_storage()
_OURS_ALONE = torch._C._storage_Use_Count(_SOME_STORAGE._cdata)
"""The count of a storage that nobody else holds."""
_pinned: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
_pinned_blocks = BlockCache()
_pinned_freed: deque[int] = deque()
"""Sizes of blocks that are free, which may be noted anywhere, at any time."""


def _use_host_memory(tensor: Tensor, blocking: bool) -> Uses:
    """Uses of a host tensor's memory, which are remembered if the host does not wait for them."""
    if tensor.layout != torch.strided:
        return Uses()
    storage = tensor.untyped_storage()
    with _host_uses_lock:
        found = _host_uses.get(storage._cdata)
        if found is None:
            found = _HostMemory(storage)
            if not blocking:
                _forget_host_uses()
                _host_uses[storage._cdata] = found
    return found.uses


def _forget_host_uses() -> None:
    """Lets go of the memory that no stream is at work with any more, or nobody else holds: what is pinned is then kept
    from other uses by the allocator, and what is not, was copied while the host waited."""
    for key, memory in list(_host_uses.items()):
        if memory.is_done or torch._C._storage_Use_Count(key) == _OURS_ALONE:
            del _host_uses[key]


def _check_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before an operation of the host's own.

    Raises:
        StreamOrderError: When it reads what a download may not have written yet, or overwrites what an upload may
            still read.
    """
    schema = _schema(func)
    if schema.is_view:
        return
    written = {id(tensor) for tensor in _tensors([args[i] for i in schema.written if i < len(args)], Tensor)}
    written |= {id(kwargs[name]) for name in schema.written_by_name if name in kwargs}
    for tensor in _tensors((*args, *kwargs.values()), Tensor):
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            continue
        key = tensor.untyped_storage()._cdata
        if (found := _host_uses.get(key)) is None:
            continue
        if id(tensor) in written:
            found.uses.write(None, func)
        else:
            found.uses.read(None, func)
        with _host_uses_lock:
            if found.is_done:
                _host_uses.pop(key, None)


# --- random numbers


_WITH_GENERATOR = {"default": "generator", "low": "low_generator", "Tensor": "Tensor_generator",
                   "low_dtype": "low_generator_dtype"}  # fmt: skip


def _with_generator(
    func: Any, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], home: SimulatedDevice
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """An operation that draws random numbers, from the device's generator instead of the host's."""
    if schema.generator is None:
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
        if any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout")) or given.get("train") is False:
            return func, args, kwargs
        overload = getattr(func.overloadpacket, _WITH_GENERATOR.get(func._overloadname, ""), None)
        if overload is None:
            raise NotImplementedError(f"{func}: simulated devices cannot draw random numbers in this operation.")
        return overload, args, {**kwargs, "generator": home.generator}
    asked: Any = args[schema.generator] if len(args) > schema.generator else kwargs.get("generator")
    if asked is not None and asked._cdata != home.generator._cdata:  # type: ignore[attr-defined]
        raise RuntimeError(f"Expected a generator of {home.name} but found one of {asked.device}.")
    if len(args) > schema.generator:
        before, after = args[: schema.generator], args[schema.generator + 1 :]
        return func, (*before, home.generator, *after), kwargs
    return func, args, {**kwargs, "generator": home.generator}


# --- tensors in arguments


def _is_simulated(device: torch.device) -> bool:
    return device.type == "meta" and device.index is not None


def _tensors(items: Iterable[Any], kind: type) -> Iterator[Any]:
    """The tensors among some values, in lists and tuples, too."""
    for item in items:
        if isinstance(item, kind):
            yield item
        elif type(item) in (list, tuple):
            yield from _tensors(item, kind)
