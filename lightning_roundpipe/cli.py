"""The commands: ``python -m lightning_roundpipe simulate`` and ``plan``."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_roundpipe.compare import NAMES, Outcome, bound_memory, compare, outcome_table
from lightning_roundpipe.layer_groups import alike, name_of, sizes_of
from lightning_roundpipe.machine import GPUS, PRECISIONS, Gpu, Machine, Precision, host_bytes
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.draw import draw
from lightning_roundpipe.schedules.memory import Memory
from lightning_roundpipe.table_names import Name
from lightning_roundpipe.tracing import LayerCall, build, load, trace
from lightning_roundpipe.units import GB

_OWN_UNIT = "the unit of --forward"
"""Of made-up times: whatever they are given in."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 2 for what cannot be done as asked."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        (simulate_command if options.command == "simulate" else plan_command)(options, console)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        Console(stderr=True).print(f"lightning_roundpipe {options.command}: {error}", markup=False)
        return 2
    return 0


def simulate_command(options: argparse.Namespace, console: Console) -> None:
    """Compares schedules on a made-up model."""
    heads = options.head_forward > 0 or options.head_backward > 0
    layers = options.layers
    every = layers + heads
    recompute = options.forward if options.recompute is None else options.recompute
    weights = options.backward / 2 if options.weight_gradient is None else options.weight_gradient
    costs = Costs(
        forward=[options.forward] * layers + [options.head_forward] * heads,
        backward=[options.backward] * layers + [options.head_backward] * heads,
        recompute=[recompute] * layers + [options.head_forward] * heads,
        weight_gradient=[weights] * layers + [options.head_backward / 2] * heads,
        upload=[options.upload] * every,
        download=[options.download] * every,
        optimizer=[options.optimizer] * every,
        parameters=[1] * every,
        hop=options.hop,
        host_links=options.host_links,
    )
    outcomes = _compare(costs, options, lanes=options.lanes)
    console.print(f"{every} layers, {options.devices} devices, {options.microbatches} microbatches", highlight=False)
    console.print(outcome_table(outcomes, _OWN_UNIT))
    _explain(outcomes, console)
    _save(costs, outcomes, options, console, f"per batch, in {_OWN_UNIT}")


def plan_command(options: argparse.Namespace, console: Console) -> None:
    """Says whether a model can be trained on a machine, and how fast."""
    machine = _machine(options)
    precision = PRECISIONS[options.precision]
    model, batch = build(load(options.model), load(options.batch), options.samples)
    calls = trace(model, batch)
    if not calls:
        raise ValueError(f"{options.model} called none of its layers.")
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    costs, memory = machine.costs(calls, precision), machine.memory(calls, precision, options.microbatches)
    outcomes = _compare(costs, options, lanes=options.lanes, memory=memory)
    console.print(
        f"{options.model}: {parameters / 1e9:.2f} billion parameters, {trainable / 1e9:.2f} of them trained, "
        f"{len(calls)} layer calls; {options.devices} devices, {options.microbatches} microbatches of "
        f"{options.samples} samples",
        highlight=False,
    )
    console.print(_layer_table(calls, costs, precision))
    planned = [outcome for outcome in outcomes if outcome.name.startswith("roundpipe")]
    for outcome in planned:
        _say_what_fits(outcome, machine, memory, (parameters, trainable), calls, precision, options, console)
    console.print(outcome_table(outcomes, "s"))
    bound = [o for o in outcomes if o not in planned and o.partition is not None and o.simulation is not None]
    if bound:
        console.print("A schedule that binds stages keeps their parameters on its devices:", highlight=False)
    for outcome in bound:
        need, room = bound_memory(outcome, memory, [call.input_bytes for call in calls]) / GB, memory.limit / GB
        verdict = "fits" if need <= room else "does not fit"
        console.print(f"  {outcome.name}: about {need:,.1f} of {room:.1f} GB, {verdict}", highlight=False)
    _explain(outcomes, console)
    _save(costs, outcomes, options, console, "s per batch")


def _compare(costs: Costs, options: argparse.Namespace, **more: object) -> list[Outcome]:
    return compare(costs, options.microbatches, options.devices, names=options.schedules, **more)  # type: ignore[arg-type]


def _machine(options: argparse.Namespace) -> Machine:
    known = GPUS.get(options.gpu)
    given = {
        name: getattr(options, name) for name in ("memory", "tflops", "link") if getattr(options, name) is not None
    }
    if known is None and len(given) < 3:
        raise ValueError(
            f"The GPU {options.gpu!r} is not known. Give --memory, --tflops and --link, or one of: {', '.join(GPUS)}."
        )
    gpu = Gpu(**given) if known is None else replace(known, **given)
    return Machine(
        options.devices, gpu, options.efficiency, options.host_memory, options.host_bandwidth, options.optimizer_rate
    )


def _layer_table(calls: Sequence[LayerCall], costs: Costs, precision: Precision) -> Table:
    """Layers of one kind and size in one row."""
    table = Table(title="Layers", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("layers", "class"):
        table.add_column(title)
    for title in ("calls", "weights\nGB", "saved\nGB", "F\nms", "B\nms", "upload\nms"):
        table.add_column(title, justify="right", no_wrap=True)
    for members in alike(
        (call.kind, call.parameters, call.forward_flops, call.backward_flops, call.activation_bytes) for call in calls
    ):
        last = calls[i := members[-1]]
        table.add_row(
            Name(name_of([calls[member].layer for member in members])),
            Name(last.kind),
            str(len(members)),
            f"{precision.compute * last.parameters / GB:.2f}",
            f"{last.activation_bytes / GB:.2f}",
            f"{1e3 * costs.forward[i]:.1f}",
            f"{1e3 * costs.backward[i]:.1f}",
            f"{1e3 * costs.upload[i]:.1f}",
        )
    return table


def _say_what_fits(
    outcome: Outcome,
    machine: Machine,
    memory: Memory,
    sizes: tuple[int, int],
    calls: Sequence[LayerCall],
    precision: Precision,
    options: argparse.Namespace,
    console: Console,
) -> None:
    assert outcome.partition is not None
    staleness = int(outcome.name == "roundpipe_async")
    device, room = memory.needed(outcome.partition) / GB, memory.limit / GB
    states, inputs = (
        size / GB for size in host_bytes(*sizes, calls, precision, options.microbatches, staleness)
    )  # fmt: skip
    host = states + inputs
    reasons = []
    if device > room:
        reasons.append(
            f"layer {calls[memory.alone()[0]].layer} alone needs {device:.1f} GB of a device, which has {room:.1f}"
        )
    if host > machine.host_memory:
        reasons.append(f"it needs {host:,.0f} GB of host memory, and there are {machine.host_memory:,.0f}")
    verdict = "fits" if not reasons else "does not fit: " + "; ".join(reasons)
    console.print(f"{outcome.name}: {verdict}", style="bold", highlight=False)
    console.print(
        f"  device {device:.1f} of {room:.1f} GB (a tenth of {machine.gpu.memory:g} left free), "
        f"host {host:,.0f} of {machine.host_memory:,.0f} GB: {states:,.0f} parameters, gradients and optimizer, "
        f"{inputs:,.0f} inputs kept for recomputing\n"
        f"  stages, in layers: forward {sizes_of(outcome.partition.forward)}; "
        f"backward {'fused ' if outcome.partition.fused else ''}{sizes_of(outcome.partition.backward)}"
        + (f"; {outcome.lanes} lanes" if outcome.lanes > 1 else ""),
        highlight=False,
    )


def _explain(outcomes: Sequence[Outcome], console: Console) -> None:
    for outcome in outcomes:
        if outcome.refusal:
            console.print(f"{outcome.name}: {outcome.refusal}", highlight=False)


def _save(
    costs: Costs, outcomes: Sequence[Outcome], options: argparse.Namespace, console: Console, per_batch: str
) -> None:
    if options.picture is None:
        return
    shown = {
        f"{outcome.name}: {float(outcome.simulation.period):,.4g} {per_batch}": outcome.simulation
        for outcome in outcomes
        if outcome.simulation is not None
    }
    periods = sorted(float(simulation.period) for simulation in shown.values())
    draw(shown, options.picture, until=2.2 * periods[len(periods) // 2])
    console.print(f"Timelines: {options.picture}", highlight=False)


def _lanes(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number or 'auto', not {text!r}")
    return None if text == "auto" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_roundpipe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = argparse.ArgumentDefaultsHelpFormatter

    simulate = commands.add_parser("simulate", help=simulate_command.__doc__, formatter_class=show)
    simulate.add_argument("--layers", type=int, default=32, help="number of equal layers")
    for name, default, text in (
        ("forward", 1.0, "time of a layer's forward for one microbatch"),
        ("backward", 2.0, "time of its backward, without the recompute"),
        ("head-forward", 0.0, "time of the forward of one more layer, the head"),
        ("head-backward", 0.0, "time of its backward"),
        ("hop", 0.0, "time of a microbatch's way from stage to stage"),
        ("upload", 0.0, "time of copying a layer's parameters to a device"),
        ("download", 0.0, "time of copying its gradients back"),
        ("optimizer", 0.0, "time of the optimizer's step for a layer"),
    ):
        simulate.add_argument(f"--{name}", type=float, default=default, help=text)
    simulate.add_argument("--recompute", type=float, help="time of a layer's recompute; else that of its forward")
    simulate.add_argument("--weight-gradient", type=float, help="part of backward that may wait; else half of it")
    simulate.add_argument(
        "--host-links", type=float, help="how many links at full rate the host's memory keeps up with"
    )

    plan = commands.add_parser("plan", help=plan_command.__doc__, formatter_class=show)
    plan.add_argument("--model", required=True, help="makes the model, called without arguments: package.module:name")
    plan.add_argument("--batch", required=True, help="makes a batch, called with --samples: package.module:name")
    plan.add_argument("--samples", type=int, default=4, help="samples of a microbatch")
    plan.add_argument("--gpu", default="RTX 4090", help=f"one of: {', '.join(GPUS)}")
    plan.add_argument("--memory", type=float, help="of a device, in GB, instead of the GPU's")
    plan.add_argument("--tflops", type=float, help="dense rate of a device in TFLOP/s, instead of the GPU's")
    plan.add_argument("--link", type=float, help="bandwidth between host and device in GB/s, instead of the GPU's")
    for name, default, text in (
        ("efficiency", 0.8, "share of the rate that layers reach"),
        ("host-memory", 512.0, "in GB"),
        ("host-bandwidth", 150.0, "of the host's memory, in GB/s"),
        ("optimizer-rate", 2.0, "parameters that the CPU steps, in billions per second"),
    ):
        plan.add_argument(f"--{name}", type=float, default=default, help=text)
    plan.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16-mixed", help="as the Trainer's")

    for command in (simulate, plan):
        command.add_argument("--devices", type=int, default=8, help="number of devices")
        command.add_argument("--microbatches", type=int, default=16, help="number of microbatches")
        command.add_argument("--lanes", type=_lanes, default=1, help="RoundPipe's lanes, or auto")
        command.add_argument("--schedules", nargs="+", choices=NAMES, default=list(NAMES), help="what to compare")
        command.add_argument("--picture", help="where to save the timelines (.png, .svg, .pdf)")
    return parser
