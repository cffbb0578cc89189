"""What each schedule would make of a model: simulated side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_roundpipe.schedules.costs import Costs, stage_ranges
from lightning_roundpipe.schedules.memory import Memory, finest
from lightning_roundpipe.schedules.named import BOUND, bound_schedule
from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.planner import check_numbers, plan
from lightning_roundpipe.schedules.simulate import Simulation, batches_of, simulate

NAMES = ("roundpipe", "roundpipe_async", *BOUND)


@dataclass(frozen=True)
class Outcome:
    """One schedule, simulated over several batches; or why it cannot be used."""

    name: str
    lanes: int = 1
    partition: Partition | None = None
    simulation: Simulation | None = None
    refusal: str = ""


def compare(
    costs: Costs,
    microbatches: int,
    devices: int,
    *,
    names: Sequence[str] = NAMES,
    lanes: int | None = 1,
    memory: Memory | None = None,
    batches: int | None = None,
) -> list[Outcome]:
    """Simulates schedules on the same work.

    ``roundpipe`` computes with the newest parameters, as the bound schedules do, ``roundpipe_async`` with those of one
    step before.

    Args:
        costs: The times of the layers.
        microbatches: Number of microbatches of the batch.
        devices: Number of devices.
        names: Of the schedules.
        lanes: RoundPipe's lanes; ``None``: the best number of them.
        memory: What RoundPipe's stages must fit into. If a single layer does not, one layer per stage is simulated all
            the same.
        batches: How many batches; ``None``: as many as show the steady state.

    Raises:
        ValueError: There are no devices, no microbatches, or no layer that takes time, or no such lanes.
    """
    check_numbers(devices, microbatches, lanes)
    if not any(costs.forward) and not any(costs.backward_with_recompute()):
        raise ValueError("No layer takes any time, so there is nothing to compare.")
    made = []
    for name in names:
        if name in ("roundpipe", "roundpipe_async"):
            staleness = int(name == "roundpipe_async")
            if memory is not None and memory.alone()[1] > memory.limit:
                partition, used = finest(len(costs.forward)), lanes or 1
            else:
                found = plan(costs, microbatches, devices, staleness=staleness, lanes=lanes, memory=memory)
                partition, used = found.partition, found.lanes
            count = batches or (3 * devices + 3 if staleness else 4)
            schedules = batches_of(partition, microbatches, devices, count, used)
            simulation = simulate(schedules, partition, costs, staleness=staleness)
            made.append(Outcome(name, used, partition, simulation))
            continue
        try:
            partition, schedule = bound_schedule(
                name, costs.forward, costs.backward_with_recompute(), microbatches, devices
            )
        except ValueError as error:
            made.append(Outcome(name, refusal=str(error)))
        else:
            made.append(Outcome(name, 1, partition, simulate([schedule] * (batches or 4), partition, costs)))
    return made


def bound_memory(outcome: Outcome, memory: Memory, inputs: Sequence[Cost]) -> Cost:
    """The most that a device of a schedule that binds stages holds at a time, in the unit of ``memory``.

    Its layers' parameters and gradients, the inputs of those layers for all microbatches that are under way, the
    activations of the layer that runs, and of those whose weight gradients wait.

    Args:
        outcome: Of a schedule that could be simulated.
        memory: Sizes of the layers.
        inputs: Of each layer's inputs, for one microbatch.
    """
    assert outcome.simulation is not None and outcome.partition is not None
    ranges = stage_ranges(outcome.partition)
    spans = [span for span in outcome.simulation.actions if span.batch == 0]
    waiting = {(span.action.stage, span.action.microbatch) for span in spans if span.action.kind == "W"}
    most: Cost = 0
    for device in range(len(outcome.simulation.devices)):
        actions = [span.action for span in spans if span.device == device]
        held = {call for action in actions for call in ranges[action.stage]}
        now = peak = sum(memory.parameters[call] + memory.gradients[call] for call in held)
        for action in actions:
            calls = ranges[action.stage]
            kept, saved = sum(inputs[call] for call in calls), sum(memory.activations[call] for call in calls)
            now += kept if action.kind == "F" else 0
            if action.kind != "W":
                peak = max(peak, now + max(memory.activations[call] for call in calls))
            if action.kind == "W":
                now -= kept + saved
            elif action.kind == "B":
                now += saved if (action.stage, action.microbatch) in waiting else -kept
                peak = max(peak, now)
        most = max(most, peak)
    return most


def outcome_table(outcomes: Sequence[Outcome], unit: str) -> Table:
    """The outcomes for a terminal: step time and where the devices' time goes, in steady state."""
    table = Table(
        title=f"Step time in {unit} and where the devices' time goes, in %",
        caption="busy: recompute included; useful: forward and backward only; upload, optimizer: waiting for them; "
        "live: microbatches on a device",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("schedule", no_wrap=True)
    for title in ("stages", "step", "busy", "bubble", "upload", "opti-\nmizer", "useful", "live"):
        table.add_column(title, justify="right", no_wrap=True)
    for outcome in outcomes:
        if outcome.simulation is None or outcome.partition is None:
            table.add_row(outcome.name, *["-"] * 8)
            continue
        found = outcome.simulation
        whole = float(found.period) * len(found.steady)
        busy, upload, optimizer = (
            100 * float(sum(getattr(parts, part) for parts in found.steady)) / whole
            for part in ("busy", "upload", "optimizer")
        )
        title = outcome.name + (f" x{outcome.lanes}" if outcome.lanes > 1 else "")
        table.add_row(
            title,
            f"{len(outcome.partition.forward)}+{len(outcome.partition.backward)}",
            f"{float(found.period):,.5g}",
            f"{busy:.1f}",
            f"{100 - busy - upload - optimizer:.1f}",
            f"{upload:.1f}",
            f"{optimizer:.1f}",
            f"{100 * float(found.utilization):.1f}",
            str(max(found.peak_live)),
        )
    return table
