"""What a machine has, and what a model's layers cost there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from lightning_roundpipe.host_need import bytes_of_trained
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.memory import USABLE, Memory, besides
from lightning_roundpipe.tracing import LayerCall
from lightning_roundpipe.units import GB


def _check_positive(what: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(what, name) < inf:
            raise ValueError(f"`{name}` must be finite and more than 0, got {getattr(what, name)}.")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: GB of memory, TFLOP/s in dense bfloat16, GB/s between it and the host each way.

    Raises:
        ValueError: A value is not a number above 0.
    """

    memory: float
    tflops: float
    link: float

    def __post_init__(self) -> None:
        _check_positive(self, "memory", "tflops", "link")


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "RTX 3090": Gpu(24, 71, 25),
        "RTX 4090": Gpu(24, 165, 25),
        "RTX 5090": Gpu(32, 209, 50),
        "L40S": Gpu(48, 362, 25),
        "A100 40GB": Gpu(40, 312, 25),
        "A100 80GB": Gpu(80, 312, 25),
        "H100": Gpu(80, 989, 50),
        "H200": Gpu(141, 989, 50),
    }
)


@dataclass(frozen=True)
class Machine:
    """Devices of one kind and their host.

    Attributes:
        devices: Number of devices.
        gpu: Each of them.
        efficiency: The share of the data sheet's rate that layers reach.
        host_memory: In GB.
        host_bandwidth: Of the host's memory, in GB/s, for all copies together.
        optimizer_rate: Parameters that the CPU steps, in billions per second.

    Raises:
        ValueError: A value cannot be.
    """

    devices: int
    gpu: Gpu
    efficiency: float = 0.8
    host_memory: float = 512
    host_bandwidth: float = 150
    optimizer_rate: float = 2

    def __post_init__(self) -> None:
        _check_positive(self, "devices", "efficiency", "host_bandwidth", "optimizer_rate")
        if self.efficiency > 1:
            raise ValueError(f"`efficiency` is a share, at most 1, got {self.efficiency}.")
        if not self.host_memory >= 0:
            raise ValueError(f"`host_memory` must be at least 0, got {self.host_memory}.")

    def costs(self, calls: Sequence[LayerCall], precision: "Precision") -> Costs:
        """The layers' times in seconds, sizes in bytes."""
        rate = self.gpu.tflops * 1e12 * self.efficiency
        link = self.gpu.link * GB
        gradients = [precision.device_gradient * call.trainable for call in calls]
        return Costs(
            forward=[call.forward_flops / rate for call in calls],
            backward=[call.backward_flops / rate for call in calls],
            weight_gradient=[
                max(call.backward_flops - call.forward_flops, 0) / rate if call.trainable else 0 for call in calls
            ],
            upload=[precision.compute * call.parameters / link for call in calls],
            download=[size / link for size in gradients],
            optimizer=[call.trainable / (self.optimizer_rate * 1e9) for call in calls],
            add=[3 * size / (self.host_bandwidth * GB) for size in gradients],  # read two, write one
            parameters=[precision.compute * call.parameters for call in calls],
            hop=2 * max((call.input_bytes for call in calls), default=0) / link,
            host_links=self.host_bandwidth / self.gpu.link,
        )

    def memory(self, calls: Sequence[LayerCall], precision: "Precision", microbatches: int) -> Memory:
        """What stages must fit into, in bytes. A tenth of the device is left to workspaces and fragmentation."""
        inputs = [call.input_bytes for call in calls]
        return Memory(
            limit=USABLE * self.gpu.memory * GB,
            parameters=[precision.compute * call.parameters for call in calls],
            gradients=[precision.device_gradient * call.trainable for call in calls],
            activations=[call.activation_bytes for call in calls],
            fresh=[precision.compute * call.trainable for call in calls] if microbatches > 1 else (),
            besides=besides(inputs, max(inputs, default=0), microbatches, self.devices),
        )


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter.

    Attributes:
        compute: Of the copy that devices compute with.
        device_gradient: Of the gradients that a device sums up.
        host: Of the parameter itself.
    """

    compute: int
    device_gradient: int
    host: int


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16-mixed": Precision(compute=2, device_gradient=4, host=4),
        "bf16-true": Precision(compute=2, device_gradient=2, host=2),
    }
)


def host_bytes(
    parameters: int, trainable: int, calls: Sequence[LayerCall], precision: Precision, microbatches: int, staleness: int
) -> tuple[int, int]:
    """What the host holds: for parameters, gradients and Adam's state, and for the inputs kept for recomputing.
    Gradients are in full precision, as with clipping.
    """
    mixed = precision.compute < precision.host
    trained = bytes_of_trained(precision.host, mixed=mixed, staleness=staleness, rounds_gradients=False)
    states = precision.host * (parameters - trainable) + trained.total * trainable
    return states, microbatches * sum(call.input_bytes for call in calls)
