"""Masters, what layers compute with, and which version of it is ready.

Versions count optimizer steps: version 0 are the initial parameters, version ``k`` those after ``k`` steps. With
staleness 0 a batch computes with the newest version; with staleness 1 with the one before it, never anything else.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.turnstile import Monitor
from lightning_roundpipe.state.sharing import is_same_memory
from lightning_roundpipe.state.step_waits import StepWaits


class Unit:
    """Parameters that always become ready together: those that the same set of layers holds, or none does.

    Attributes:
        done: Number of optimizer steps that are finished and published for this unit. Guarded by the monitor's lock.
        uploads: For each device, by name, when it has read what layers compute with.
    """

    def __init__(self, index: int, name: str, condition: threading.Condition) -> None:
        self.index = index
        self.name = name
        self.parameters: list[nn.Parameter] = []
        self.done = 0
        self.uploads: dict[str, Event] = {}
        self.changed = condition


def _ordinary_memory(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


def _has_reached(unit: Unit, version: int) -> bool:
    return unit.done >= version


def _with_flag_of(parameter: nn.Parameter, leaf: nn.Parameter) -> nn.Parameter:
    """The leaf; if the parameter was frozen or unfrozen within the step, one that is, too."""
    if leaf.requires_grad == parameter.requires_grad:
        return leaf
    return nn.Parameter(leaf.detach(), requires_grad=parameter.requires_grad)


class ParameterStore:
    """The module's own parameters (masters), and for each the tensors that layers compute with.

    With staleness 0 a layer computes with the master's own memory: the next step of a layer cannot come before its last
    use. With staleness 1 the optimizer is one step ahead of the layers, so each version is copied into one of two
    buffers; a buffer is overwritten only when the batch that used it is complete. Frozen parameters have one value
    only, the master's, until they are unfrozen.

    Args:
        root: The module.
        layers: Its layers.
        monitor: Of all waits.
        staleness: 0 or 1.
        host_memory: Makes memory that devices copy from and to; see :meth:`Device.host_memory`. By default, of the
            ordinary kind.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[Layer],
        monitor: Monitor,
        staleness: int,
        host_memory: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        self.staleness = staleness
        self.host_memory = host_memory or _ordinary_memory
        self.enqueued = 0
        """Number of optimizer steps handed in so far. Only the main thread writes it."""
        self.step_waits = StepWaits()
        self._monitor = monitor
        self.units: list[Unit] = []
        self._unit_of: dict[int, Unit] = {}
        self._names = {id(parameter): name for name, parameter in root.named_parameters(remove_duplicate=True)}
        self._make_units(root, layers)
        self._layer_units = [self._units_of(layer.parameters) for layer in layers]
        self._versioned = {id(p) for p in self.parameters() if p.requires_grad} if staleness else set()
        """Parameters, by id, that are kept in several versions."""
        self._leaves: list[dict[int, nn.Parameter]] = [{} for _ in range(staleness + 1)]
        self._half: dict[int, torch.dtype] = {}
        for version in range(staleness + 1):
            for parameter in self.parameters():
                self._leaves[version][id(parameter)] = self._make_leaf(parameter)

    def _make_units(self, root: nn.Module, layers: Sequence[Layer]) -> None:
        holders: dict[int, list[int]] = {}
        for layer in layers:
            for parameter in layer.parameters:
                holders.setdefault(id(parameter), []).append(layer.index)
        by_holders: dict[tuple[int, ...], Unit] = {}
        for name, parameter in root.named_parameters(remove_duplicate=True):
            key = tuple(holders.get(id(parameter), ()))
            unit = by_holders.get(key)
            if unit is None:
                label = layers[key[0]].name if key else name
                unit = Unit(len(self.units), label, self._monitor.condition())
                self.units.append(unit)
                by_holders[key] = unit
            unit.parameters.append(parameter)
            self._unit_of[id(parameter)] = unit

    def _units_of(self, parameters: Iterable[nn.Parameter]) -> list[Unit]:
        return list({self._unit_of[id(parameter)]: None for parameter in parameters})

    def _make_leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.detach()
        if self._is_copy(parameter):
            data = self._copied(data, self._half.get(id(parameter), data.dtype))
        return nn.Parameter(data, requires_grad=parameter.requires_grad)

    def _copied(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        return self.host_memory(data, dtype).copy_(data)

    def _is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether layers compute with a copy of the parameter instead of its own memory."""
        return id(parameter) in self._versioned or id(parameter) in self._half

    def keeps_versions(self, parameter: nn.Parameter) -> bool:
        """Whether the newest value and the one computed with may differ. From the moment on that it is unfrozen."""
        if self.staleness and parameter.requires_grad and id(parameter) not in self._versioned:
            self._versioned.add(id(parameter))
            for leaves in self._leaves:  # it has not been stepped before, so all versions are alike
                leaves[id(parameter)] = self._make_leaf(parameter)
        return id(parameter) in self._versioned

    def travel_in_half(self, half: Mapping[nn.Parameter, torch.dtype]) -> None:
        """From now on layers compute with half-precision copies of these parameters. Called between batches."""
        for parameter, dtype in half.items():
            self._half[id(parameter)] = dtype
            for leaves in self._leaves:
                leaf = leaves[id(parameter)]
                leaves[id(parameter)] = nn.Parameter(
                    self._copied(leaf.detach(), dtype), requires_grad=leaf.requires_grad
                )

    @property
    def travels_in_half(self) -> bool:
        """Whether there are parameters that travel in half precision."""
        return bool(self._half)

    def half_precision(self, parameter: nn.Parameter) -> torch.dtype | None:
        """In which type the parameter travels, if in half precision."""
        return self._half.get(id(parameter))

    def full_precision_leaf(self, parameter: nn.Parameter, version: int) -> Tensor:
        """What code outside layers computes with.

        Raises:
            RuntimeError: With staleness 1, for a parameter of which only a half-precision copy of that version exists.
        """
        self.keeps_versions(parameter)
        if id(parameter) not in self._half:
            return self.leaf(parameter, version)
        if self.staleness:
            raise RuntimeError(
                f"The parameter {self._names[id(parameter)]!r} is used outside its layer, which it was not in the first"
                " batch. With staleness 1 and mixed precision there is only a half-precision copy of its value. Use it"
                " from the first batch on, or strategy='roundpipe' (staleness 0)."
            )
        return parameter

    def parameters(self) -> Iterable[nn.Parameter]:
        for unit in self.units:
            yield from unit.parameters

    def owns(self, tensor: object) -> bool:
        return id(tensor) in self._unit_of

    def name(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def unit_of(self, parameter: nn.Parameter) -> Unit:
        return self._unit_of[id(parameter)]

    def units_of_layer(self, layer: Layer) -> list[Unit]:
        return self._layer_units[layer.index]

    def add_to_layer(self, layer: Layer, parameter: nn.Parameter) -> None:
        """Counts a parameter that the layer reaches past its arguments among the layer's.

        Raises:
            RuntimeError: With staleness 1, which such a parameter would escape.
        """
        if self.staleness:
            raise RuntimeError(
                f"layer {layer.name!r} uses the parameter {self._names[id(parameter)]!r} of another module past its"
                " arguments, so it would compute with the newest values instead of those one step behind. Pass it as an"
                " argument, or use strategy='roundpipe' (staleness 0)."
            )
        unit = self._unit_of[id(parameter)]
        if unit not in self._layer_units[layer.index]:
            self._layer_units[layer.index].append(unit)

    def version_for_next_batch(self) -> int:
        return max(0, self.enqueued - self.staleness)

    def leaf(self, parameter: nn.Parameter, version: int) -> nn.Parameter:
        """What is computed with at a version, as a leaf of autograd's graph. Valid after :meth:`wait`."""
        return self._leaves[version % (self.staleness + 1)][id(parameter)]

    def layer_leaves(self, layer: Layer, version: int) -> list[nn.Parameter]:
        if self.staleness:
            for parameter in layer.parameters:
                self.keeps_versions(parameter)
        leaves = self._leaves[version % (self.staleness + 1)]
        return [_with_flag_of(parameter, leaves[id(parameter)]) for parameter in layer.parameters]

    def wait(self, units: Iterable[Unit], version: int, batch: float) -> None:
        """Waits, for a batch, until the units have been stepped and published at least to the version."""
        for unit in units:
            if unit.done < version:  # reading an int needs no lock, and it only grows
                with self._monitor.lock, self.step_waits.waiting():
                    self._monitor.wait_for(unit.changed, partial(_has_reached, unit, version), batch)

    def note_upload(self, layer: Layer, device: Device) -> None:
        """A device was told to read what the layer computes with."""
        if (event := device.uploaded) is not None:
            for unit in self._layer_units[layer.index]:
                unit.uploads[device.name] = event

    def wait_uploads(self, unit: Unit) -> None:
        """Waits until no device reads any more what the unit's layers have computed with."""
        for event in list(unit.uploads.values()):
            event.synchronize()

    def publish(self, unit: Unit) -> None:
        """Makes the unit's masters, after a step, the newest version."""
        version = unit.done + 1
        self.wait_uploads(unit)
        self._copy(unit, version)
        with self._monitor.lock:
            unit.done = version
            unit.changed.notify_all()

    def _copy(self, unit: Unit, version: int) -> None:
        with torch.no_grad():
            for parameter in unit.parameters:
                if self._is_copy(parameter):
                    self.leaf(parameter, version).copy_(parameter)

    def follow(self, parameter: nn.Parameter) -> None:
        """Follows new data that the user assigned to a parameter (``parameter.data = ...``)."""
        if not self._is_copy(parameter) and not is_same_memory(self.leaf(parameter, 0), parameter):
            for leaves in self._leaves:
                leaves[id(parameter)] = self._make_leaf(parameter)

    def refresh(self, *, values: bool) -> None:
        """Follows what the user did to the parameters since the last batch: new data, another ``requires_grad``.

        Runs on the main thread between batches. Batches in flight keep the leaves that they started with.

        Args:
            values: Whether user code may have changed values, too. Only when no step is pending.
        """
        if values:
            for unit in self.units:
                self._copy(unit, unit.done)
        for parameter in self.parameters():
            self.keeps_versions(parameter)
            for leaves in self._leaves:
                leaf = leaves[id(parameter)]
                moved = not self._is_copy(parameter) and not is_same_memory(leaf, parameter)
                if moved or leaf.shape != parameter.shape:
                    leaves[id(parameter)] = self._make_leaf(parameter)
                elif leaf.requires_grad != parameter.requires_grad:
                    leaves[id(parameter)] = nn.Parameter(leaf.detach(), requires_grad=parameter.requires_grad)

    def stale_values(self) -> dict[str, Tensor]:
        """Staleness 1: the values that the next batch computes with, by parameter name. Those that have one value only,
        the master's, are not among them."""
        version = self.version_for_next_batch()
        versioned = filter(self.keeps_versions, self.parameters())
        return {self._names[id(p)]: self.leaf(p, version).detach().clone() for p in versioned}

    def load_stale_values(self, values: dict[str, Tensor]) -> None:
        """Staleness 1, before the first batch: makes these the version before the masters'."""
        with torch.no_grad():
            for parameter in filter(self.keeps_versions, self.parameters()):
                stale = values.get(self._names[id(parameter)], parameter)  # unfrozen since
                self._leaves[0][id(parameter)].copy_(stale)
                self._leaves[1][id(parameter)].copy_(parameter)
        with self._monitor.lock:
            self.enqueued = 1
            for unit in self.units:
                unit.done = 1
