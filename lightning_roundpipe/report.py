"""What the pipeline did, as data and as tables."""

from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from lightning_roundpipe.pipeline.runtime import Pipeline


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: how large it is, in which stages it runs, and how long one microbatch takes."""

    name: str
    kind: str
    parameters: int
    forward_stage: tuple[int, ...]
    backward_stage: tuple[int, ...]
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device: how long it was busy with layers, and how many layer calls it ran."""

    name: str
    busy_seconds: float
    actions: int


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Layers, stages and devices of a training run."""

    layers: list[LayerRow]
    devices: list[DeviceRow]
    microbatches: int
    batches: int
    wall_seconds: float

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
        devices = Table(title=f"Devices ({self.batches} batches in {self.wall_seconds:.1f} s)")
        devices.add_column("device")
        for title in ("busy s", "busy %", "layer calls"):
            devices.add_column(title, justify="right")
        for device in self.devices:
            share = 100 * device.busy_seconds / self.wall_seconds if self.wall_seconds else 0.0
            devices.add_row(device.name, f"{device.busy_seconds:.2f}", f"{share:.1f}", f"{device.actions:,}")
        return Group(layers, devices)


def make_report(pipeline: Pipeline, wall_seconds: float) -> PipelineReport:
    """Reads a pipeline's present state."""
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
                1000 * pipeline.forward_costs[layer.index].mean,
                1000 * pipeline.backward_costs[layer.index].mean,
            )
        )
    devices = [
        DeviceRow(device.name, use.busy_seconds, use.calls)
        for device, use in zip(pipeline.devices, pipeline.use, strict=True)
    ]
    return PipelineReport(rows, devices, pipeline.last_microbatches, pipeline.batches, wall_seconds)
