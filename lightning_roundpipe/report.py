"""What the pipeline did, as data and as tables."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import StringIO

from rich import get_console
from rich.console import Console, Group
from rich.table import Table
from torch import nn

from lightning_roundpipe.devices import Traffic
from lightning_roundpipe.host_need import HostNeed, describe
from lightning_roundpipe.layer_groups import alike, name_of, sizes_of
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.table_names import Name
from lightning_roundpipe.units import size_text


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: how large it is, in which stages it runs, and how long one microbatch takes.

    Attributes:
        name: Its path in the module.
        kind: The name of its class.
        parameters: How many numbers its parameters hold.
        forward_stage: The forward stages that it is in: several if it is called several times.
        backward_stage: The same for the backward.
        forward_ms: Mean milliseconds of a call's forward for one microbatch. The first batch is not measured.
        backward_ms: The same for the backward, with the recomputation, which is estimated for the last stage, for that
            needs none.
    """

    name: str
    kind: str
    parameters: int
    forward_stage: tuple[int, ...]
    backward_stage: tuple[int, ...]
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device.

    Attributes:
        name: Its name, as in errors.
        busy_seconds: How long it was busy with layers.
        actions: How many layer calls it ran, forward and backward.
        traffic: The bytes moved for them.
        upload_wait_seconds: How long it has waited for parameters and inputs on their way up, or None where that is not
            measured: without a monitor that logs metrics, and on virtual devices, which have all in place.
        peak_memory: The most bytes that it has held at a time, or None where its memory is the host's.
    """

    name: str
    busy_seconds: float
    actions: int
    traffic: Traffic
    upload_wait_seconds: float | None
    peak_memory: int | None


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Layers, stages and devices of a training run.

    Attributes:
        layers: A row for each layer, in the order of registration.
        devices: A row for each device.
        microbatches: Into how many microbatches the last batch was split.
        batches: How many batches were trained.
        wall_seconds: Time since the first batch began, everything included.
        training_seconds: The same without validation.
        optimizer_wait_seconds: How long batches have waited while the optimizer stepped in the background.
    """

    layers: list[LayerRow]
    devices: list[DeviceRow]
    microbatches: int
    batches: int
    wall_seconds: float
    training_seconds: float
    optimizer_wait_seconds: float

    def table(self) -> Group:
        """The report for a terminal."""
        layers = Table(
            title=f"Layers and stages ({self.microbatches} microbatches)",
            caption="F: forward, B: backward, with the recompute if there is one; time per microbatch",
        )
        layers.add_column("layer")
        layers.add_column("class")
        for title in ("parameters", "F stage", "B stage", "F ms", "B ms"):
            layers.add_column(title, justify="right")
        for row in self.layers:
            layers.add_row(
                Name(row.name),
                Name(row.kind),
                f"{row.parameters:,}",
                ", ".join(map(str, row.forward_stage)) or "-",
                ", ".join(map(str, row.backward_stage)) or "-",
                f"{row.forward_ms:.2f}",
                f"{row.backward_ms:.2f}",
            )
        devices = Table(
            title=f"Devices ({self.batches} batches, {self.training_seconds:.1f} s of training)",
            caption="up: parameters and activations to the device, down: gradients and activations; across:"
            " activations from other devices, past the host",
        )
        devices.add_column("device")
        for title in ("busy s", "busy %", "layer calls", "MB up", "MB down", "MB across"):
            devices.add_column(title, justify="right")
        for device in self.devices:
            share = 100 * device.busy_seconds / self.training_seconds if self.training_seconds else 0.0
            traffic = device.traffic
            moved = [f"{count / 1e6:,.1f}" for count in (traffic.up, traffic.down, traffic.across)]
            devices.add_row(device.name, f"{device.busy_seconds:.2f}", f"{share:.1f}", f"{device.actions:,}", *moved)
        return Group(layers, devices)


def make_report(pipeline: Pipeline, wall_seconds: float, training_seconds: float) -> PipelineReport:
    """Reads a pipeline's present state."""
    pipeline.measured.settle()
    rows = []
    for layer in pipeline.layers:
        plan = next((plan for plan in pipeline.plans() if layer.index in plan.positions), None)
        positions = plan.positions[layer.index] if plan is not None else []
        rows.append(
            LayerRow(
                layer.name,
                type(layer.module).__name__,
                sum(parameter.numel() for parameter in layer.parameters),
                tuple(dict.fromkeys(plan.forward_stage[p] for p in positions)) if plan is not None else (),
                tuple(dict.fromkeys(plan.backward_stage[p] for p in positions)) if plan is not None else (),
                1000 * pipeline.measured.forward[layer.index].mean,
                1000 * pipeline.measured.backward[layer.index].mean,
            )
        )
    devices = [
        DeviceRow(
            device.name,
            use.busy_seconds,
            use.calls,
            replace(device.traffic),
            device.upload_wait_seconds,
            device.peak_memory,
        )
        for device, use in zip(pipeline.devices, pipeline.measured.use, strict=True)
    ]
    return PipelineReport(
        rows,
        devices,
        pipeline.last_microbatches,
        pipeline.batches,
        wall_seconds,
        training_seconds,
        pipeline.store.step_waits.seconds,
    )


def summary(pipeline: Pipeline, need: HostNeed, available: int | None) -> Group:
    """What is known before the first batch: the layers, equal ones in one row, and where everything goes.

    Args:
        pipeline: The pipeline.
        need: What it needs of the host's memory.
        available: What there is of that, if that can be told.
    """
    table = Table(title="Layers")
    for title in ("layer", "class"):
        table.add_column(title)
    everything = _Size.of(pipeline.store.parameters())
    frozen = everything.trained < everything.numbers
    for title in ("count", "parameters", *(("trained",) if frozen else ()), "size"):
        table.add_column(title, justify="right")
    sizes = [_Size.of(layer.parameters) for layer in pipeline.layers]
    kinds = [type(layer.module).__name__ for layer in pipeline.layers]
    for members in alike(zip(kinds, sizes, strict=True)):
        names = [pipeline.layers[member].name for member in members]
        table.add_row(
            Name(name_of(names)),
            Name(kinds[members[0]]),
            str(len(members)),
            *sizes[members[0]].cells(frozen, len(members)),
        )
    held = {id(parameter) for layer in pipeline.layers for parameter in layer.parameters}
    outside = [parameter for parameter in pipeline.store.parameters() if id(parameter) not in held]
    if outside:
        table.add_row("(no layer)", "", "", *_Size.of(outside).cells(frozen))
    table.add_section()
    table.add_row("all", "", str(len(pipeline.layers)), *everything.cells(frozen))
    room = "" if available is None else f"; {size_text(available)} more are available"
    devices = ", ".join(device.name for device in pipeline.devices)
    return Group(
        table,
        f"Host memory, at least: {describe(need)}{room}.",
        f"{devices} take stages of these layers in turn, and hold their parameters meanwhile. The first batch shows"
        " which layers make a stage.",
    )


@dataclass(frozen=True)
class _Size:
    """Of some parameters: how many numbers, how many of them trained, and bytes; once for those that are shared."""

    numbers: int
    trained: int
    nbytes: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> "_Size":
        own = list({id(parameter): parameter for parameter in parameters}.values())
        trained = sum(parameter.numel() for parameter in own if parameter.requires_grad)
        return cls(sum(parameter.numel() for parameter in own), trained, sum(parameter.nbytes for parameter in own))

    def cells(self, frozen: bool, count: int = 1) -> list[str]:
        """For so many of this size. How many are trained is said if there are some that are not, anywhere."""
        numbers = (self.numbers, self.trained) if frozen else (self.numbers,)
        return [*(f"{count * number:,}" for number in numbers), size_text(count * self.nbytes)]


def as_text(table: Group) -> str:
    """For a log, as wide as the terminal."""
    text = StringIO()
    Console(file=text, width=get_console().width).print(table, highlight=False)
    return f"\n{text.getvalue().rstrip()}"


def stages_in_words(plan: Plan) -> str:
    """The stages of a plan in one line."""
    fused = "fused " if plan.fused_stage is not None else ""
    return (
        f"stages, in layers: forward {sizes_of(plan.partition.forward)};"
        f" backward {fused}{sizes_of(plan.partition.backward)}"
    )
