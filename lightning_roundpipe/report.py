"""What the pipeline did, as data and as tables."""

from dataclasses import dataclass, replace

from rich.console import Group
from rich.table import Table

from lightning_roundpipe.devices import Traffic
from lightning_roundpipe.pipeline.runtime import Pipeline


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
    """

    name: str
    busy_seconds: float
    actions: int
    traffic: Traffic


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
    """

    layers: list[LayerRow]
    devices: list[DeviceRow]
    microbatches: int
    batches: int
    wall_seconds: float
    training_seconds: float

    def table(self) -> Group:
        """The report for a terminal."""
        layers = Table(
            title=f"Layers and stages ({self.microbatches} microbatches)",
            caption="F: forward, B: backward with recompute; time per microbatch",
        )
        layers.add_column("layer", overflow="fold")
        layers.add_column("class", overflow="fold")
        for title in ("parameters", "F stage", "B stage", "F ms", "B ms"):
            layers.add_column(title, justify="right")
        for row in self.layers:
            layers.add_row(
                row.name,
                row.kind,
                f"{row.parameters:,}",
                ", ".join(map(str, row.forward_stage)) or "-",
                ", ".join(map(str, row.backward_stage)) or "-",
                f"{row.forward_ms:.2f}",
                f"{row.backward_ms:.2f}",
            )
        devices = Table(
            title=f"Devices ({self.batches} batches, {self.training_seconds:.1f} s of training)",
            caption="up: parameters and activations to the device, down: gradients and activations",
        )
        devices.add_column("device")
        for title in ("busy s", "busy %", "layer calls", "MB up", "MB down"):
            devices.add_column(title, justify="right")
        for device in self.devices:
            share = 100 * device.busy_seconds / self.training_seconds if self.training_seconds else 0.0
            moved = [f"{count / 1e6:,.1f}" for count in (device.traffic.up, device.traffic.down)]
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
        DeviceRow(device.name, use.busy_seconds, use.calls, replace(device.traffic))
        for device, use in zip(pipeline.devices, pipeline.measured.use, strict=True)
    ]
    return PipelineReport(rows, devices, pipeline.last_microbatches, pipeline.batches, wall_seconds, training_seconds)
