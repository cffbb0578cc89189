"""The Lightning strategy: splits training steps into microbatches and runs them through the pipeline."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_roundpipe import microbatch as mb
from lightning_roundpipe.callbacks import WaitForPipeline, callbacks_of, hooks_that_look, looks_before_backward
from lightning_roundpipe.deciding import BatchSplitter
from lightning_roundpipe.devices import AcceleratorDevice, CpuDevice, Device, SimulatedDevice, arrived
from lightning_roundpipe.devices.hardware import hardware_of
from lightning_roundpipe.devices.memory_limit import DeviceMemory, check_device_memory, memory_limit
from lightning_roundpipe.devices.pinned import PinMemory, Pinning, check_pin_memory
from lightning_roundpipe.garbage import SparedObjects, collect
from lightning_roundpipe.host_need import available_memory, check_fits, host_need, most_to_pin
from lightning_roundpipe.host_root import with_host_root
from lightning_roundpipe.monitor import PipelineMonitor, shows_summary
from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.between import UseBetweenBatches
from lightning_roundpipe.pipeline.compiling import compile_settings, compiled_function
from lightning_roundpipe.pipeline.layers import LayerSpec
from lightning_roundpipe.pipeline.rng import derive_seed, program_seed
from lightning_roundpipe.pipeline.runtime import Pipeline, Step
from lightning_roundpipe.pipeline.strays import bring_home
from lightning_roundpipe.pipeline.turnstile import Cancelled
from lightning_roundpipe.precision import RoundPipePrecision, with_background_step
from lightning_roundpipe.processes import MultiProcessStrategy
from lightning_roundpipe.refusals import check_module, check_optimizers
from lightning_roundpipe.report import PipelineReport, as_text, make_report, summary
from lightning_roundpipe.schedules import NAMES as SCHEDULES
from lightning_roundpipe.schedules import Schedule, ScheduleName, Scheduler
from lightning_roundpipe.state.gradients import BatchGradients
from lightning_roundpipe.state.optimizer import (
    BeforeStep,
    OptimizerWorker,
    StepJob,
    has_step_hooks,
    holds_parameters_elsewhere,
    needs_closure,
)
from lightning_roundpipe.step_logging import StepLogging, current_microbatch, logging_nothing
from lightning_roundpipe.step_profiling import StepProfiling, recording_nothing
from lightning_roundpipe.timeline import Timeline, TimelineWriter
from lightning_roundpipe.trees import map_tree, tensors

_CHECKPOINT_KEY = "roundpipe"
_FEW_BATCHES = 10
"""It is not worth while to spare the garbage collector what was there before so few."""


class RoundPipeStrategy(MultiProcessStrategy):
    """Trains with parameters, gradients and optimizer state in host memory and the devices as a pool of workers.

    Args:
        microbatches: Into how many microbatches a batch is split; by default one more than devices. Never more than
            the batch has samples, or pairs of samples where there is a BatchNorm.
        staleness: 0: a batch computes with the parameters after the previous batch's optimizer step, as on one device.
            1: with those one step before, so that the step is hidden behind the next batch's computation. All that
            ``training_step`` reads of trained parameters is then that old; it cannot change them itself.
        layers: Which submodules are moved and run as one: class names, classes, module paths, or a function. By
            default the repeated blocks of the model and what remains; see :func:`find_layers`.
        split: ``"step"``: each microbatch runs ``training_step`` on its part of the batch. ``"model"``:
            ``training_step`` runs once, with the whole batch, and the calls within it that treat samples independently
            are split; right for any loss. ``"whole"``: nothing is split. ``"auto"``: the first batch decides, by its
            loss against its microbatches': ``"step"``, with the weighting that fits, or else ``"model"``.
        loss_weight: Weight of a microbatch's loss in the batch's: by number of ``"samples"``, by number of ``"tokens"``
            (labels that are not ignored), ``"sum"`` for losses that are sums, or a function of the microbatch.
        background_step: Whether the optimizer steps in a background thread. Otherwise it steps in line, in Lightning's
            own way.
        compile: Whether layers run compiled (``torch.compile``), with one compilation for all layers of one kind; or
            the keyword arguments of ``torch.compile``, such as ``{"backend": "aot_eager"}``.
        schedule: Who runs which stage when: ``"roundpipe"``, or one of its rivals, which bind stages to devices:
            ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb1p"``, ``"dualpipe"``, ``"model_parallel"``,
            ``"sequential"``; or a :class:`Schedule` for these devices and microbatches. The numbers are the same.
        lanes: For ``"roundpipe"``: into how many groups the devices are divided, each of which runs all stages for its
            share of the microbatches. More lanes leave less idle, and load each stage more often. ``"auto"``: as many
            as are best by the measured costs.
        device_memory: What stages may take of each device, for ``"roundpipe"``: a number of bytes, a share of all its
            memory (a ``float`` of at most 1), or ``"auto"``: what is free. Stages are cut so that the parameters of two
            of them, the gradients of one and the activations of the calls that are under way stay within that. Where
            that leaves room, inputs kept for the recompute stay on the device, too. A number of bytes above what a
            device has counts as what is free, with a warning; one below a MB is an error, for another unit was meant,
            unless the devices are simulated. Activations are measured in the first batch, so if later samples are
            longer, leave room for them. With ``"auto"`` a layer that seems too large by itself is tried; otherwise it
            is an error. Virtual CPU devices have the host's memory and no limit, unless there is a number of bytes; of
            activations, only the inputs of layers are counted there.
        pin_memory: Whether the host memory that devices copy from and to is pinned (locked in place), so that the host
            need not wait for copies: gradients, copies of parameters, inputs kept for the recompute, and what goes up
            at the time. True: all of it; where the system refuses, training ends with an error. False: none; the
            numbers are the same, but copies take time beside computing. ``"auto"``: as much as the system allows, and
            at most half of the memory that is available when training begins; one warning says where that ends.
            Virtual CPU devices copy nothing, so it means nothing there.
        recompute: What is run again for the backward. ``"layer"``: each layer call, but those of the last stage, whose
            backward follows at once; of the others only the inputs are kept. ``"none"``: nothing, where memory allows
            and it is right; each call keeps what autograd saves of it. On virtual CPU devices that is host memory. On
            devices with memory of their own, with ``schedule="roundpipe"``, graphs stay for which there is room beside
            the stages, without the parameters. Of the first batch all is run again, and so is a layer that writes its
            own state or whose arguments are changed in place.
        devices: Simulated accelerators, for tests and planning, in place of virtual CPU devices.
        timeline: Where some batches are written to as a trace and as a picture, or a :class:`Timeline`, which says
            also which batches.
        accelerator: As for any strategy.
        checkpoint_io: As for any strategy.
        precision_plugin: As for any strategy.

    Raises:
        ValueError: When an argument is out of range.
        TypeError: When ``torch.compile`` does not know an argument of `compile`, or `devices` is a number.
    """

    strategy_name = "roundpipe"

    def __init__(
        self,
        microbatches: int | None = None,
        staleness: Literal[0, 1] = 0,
        layers: Any | None = None,
        split: Literal["step", "model", "whole", "auto"] = "auto",
        loss_weight: Literal["samples", "tokens", "sum"] | Callable[[Any], Any] = "samples",
        background_step: bool = True,
        compile: bool | dict[str, Any] = False,
        schedule: ScheduleName | Schedule = "roundpipe",
        lanes: int | Literal["auto"] = 1,
        device_memory: int | float | Literal["auto"] = "auto",
        pin_memory: bool | Literal["auto"] = "auto",
        recompute: Literal["layer", "none"] = "layer",
        devices: Sequence[SimulatedDevice] | None = None,
        timeline: str | Path | Timeline | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
            raise ValueError(
                "`microbatches` must be a whole number of at least 1, or None for one more than devices; got"
                f" {microbatches!r}."
            )
        if staleness not in (0, 1) or not isinstance(staleness, int):
            raise ValueError(f"`staleness` must be 0 or 1, got {staleness!r}.")
        if split not in ("auto", "step", "model", "whole"):
            raise ValueError(f"`split` must be 'auto', 'step', 'model' or 'whole', got {split!r}.")
        if isinstance(loss_weight, str) and loss_weight not in ("samples", "tokens", "sum"):
            raise ValueError(f"`loss_weight` must be 'samples', 'tokens', 'sum' or a function, got {loss_weight!r}.")
        if not isinstance(schedule, Schedule) and not (isinstance(schedule, str) and schedule in SCHEDULES):
            raise ValueError(f"`schedule` must be one of {', '.join(SCHEDULES)}, or a Schedule; got {schedule!r}.")
        if lanes != "auto" and (not isinstance(lanes, int) or lanes < 1):
            raise ValueError(f"`lanes` must be at least 1 or 'auto', got {lanes!r}.")
        if isinstance(devices, (int, str)):
            raise TypeError(
                "The strategy's `devices` are a list of devices (see its docstring), and their number belongs to the"
                f" Trainer: Trainer(devices={devices!r}); got RoundPipeStrategy(devices={devices!r})."
            )
        check_device_memory(device_memory, simulated=devices is not None)
        check_pin_memory(pin_memory)
        if device_memory != "auto" and schedule != "roundpipe":
            raise ValueError("`device_memory` is for schedule='roundpipe' only: the others' stages are given.")
        if recompute not in ("layer", "none"):
            raise ValueError(f"`recompute` must be 'layer' or 'none', got {recompute!r}.")
        if not isinstance(compile, (bool, dict)):
            raise ValueError(f"`compile` must be True, False or keyword arguments of torch.compile, got {compile!r}.")
        if timeline is not None and not isinstance(timeline, (str, Path, Timeline)):
            raise ValueError(f"`timeline` must be a path or a Timeline, got {timeline!r}.")
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._communicates = False
        """Whether training_step talks to other processes."""
        self.microbatches = microbatches
        self.staleness = staleness
        self.layers: LayerSpec | None = [layers] if isinstance(layers, (str, type)) else layers
        self.split = split
        self.loss_weight = loss_weight
        self.background_step = background_step
        self.schedule = schedule
        self.lanes = lanes
        self.device_memory: DeviceMemory = device_memory
        self.pin_memory: PinMemory = pin_memory
        self.recompute = recompute
        self.devices = None if devices is None else list(devices)
        self.timeline = Timeline(timeline) if isinstance(timeline, (str, Path)) else timeline
        self.compile = compile
        options = compile if isinstance(compile, dict) else {}
        self._compile_settings = None if compile is False else compile_settings(options)
        self.steps_in_background = False
        """Whether the present fit's optimizer steps in the background. Known from the first batch on."""
        self._pipeline: Pipeline | None = None
        self._worker: OptimizerWorker | None = None
        self._timeline_writer: TimelineWriter | None = None
        self._backward_done = 0.0
        """When the last backward was, where the optimizer steps in line."""
        self._batch: Batch | None = None
        self._layers_log: StepLogging | None = None
        """The present batch's logging, if layers do."""
        self._splitter: BatchSplitter | None = None
        """How the batches of the present fit are split, or of the last one."""
        self._between: UseBetweenBatches | None = None
        self._spared: SparedObjects | None = None
        self._settled = self._lost_step = False
        self._told_of_none = False
        """Whether the present fit has warned of microbatches without a loss."""
        self._gradients_unused = False
        """Whether there are gradients of batches after the last optimizer step."""
        self._own_callbacks: list[Callback] = []
        """Those that it has added to the trainer's."""
        self._restored: dict[str, Any] | None = None
        self._fresh_metrics: dict[int, Metric] = {}
        self._threads_before: int | None = None
        self._started = self._validation_started = self._validation_seconds = 0.0
        self._seed = 0
        self._report: PipelineReport | None = None
        self._last_state: dict[str, Any] | None = None

    # -- set up and tear down --------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        if self.devices is not None and not isinstance(accelerator, CPUAccelerator):
            raise MisconfigurationException(
                f"RoundPipeStrategy(devices=...) are simulated devices, and Lightning has chosen"
                f" {type(accelerator).__name__}. Use Trainer(accelerator='cpu'), or leave the strategy's devices out."
            )
        self._accelerator = with_host_root(accelerator, lambda: self.parallel_devices or ())

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else with_background_step(plugin)

    def connect(self, model: "pl.LightningModule") -> None:
        super().connect(model)
        if self._trainer is not None:  # before any hook runs, for with the first one the profiler starts
            _let_profiler_see_threads(self._trainer)

    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._told_of_none = False
            if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
                rank_zero_info(
                    "roundpipe: automatic_optimization=False: training_step runs as in plain Lightning, without"
                    " microbatches and devices."
                )
            self._own_callbacks = [WaitForPipeline(self)]
            if _monitor_of(trainer) is None:
                self._own_callbacks.append(PipelineMonitor())
            callbacks_of(trainer)[:0] = self._own_callbacks

    def teardown(self) -> None:
        self._close()
        if self._trainer is not None:
            callbacks = callbacks_of(self._trainer)
            callbacks[:] = [callback for callback in callbacks if callback not in self._own_callbacks]
        self._own_callbacks = []
        self._restored = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._close()

    @property
    def _trainer(self) -> "pl.Trainer | None":
        return None if self._lightning_module is None else self._lightning_module._trainer

    # -- several processes -----------------------------------------------------------------------------------------

    def before_collective(self) -> None:
        """
        Raises:
            RuntimeError: In one of several microbatches, whose order is each process's own.
        """
        if not self.is_distributed or current_microbatch.get(None) is None:
            return
        batch = self._pipeline.batch if self._pipeline is not None else None
        if batch is not None and batch.microbatches > 1:
            raise RuntimeError(
                "training_step communicates with the other processes (all_gather, reduce, a metric's compute, ...) once"
                " per microbatch, in an order that is not the same in each process. Do it outside of training_step, or"
                " use RoundPipeStrategy(split='model')."
            )
        self._communicates = True

    def _wait_backward(self) -> None:
        if self._pipeline is not None:
            with self._phase("backward_wait"):
                self._pipeline.wait_backward()

    def _average(self, pipeline: Pipeline) -> None:
        """Averages over the processes what the next optimizer step uses."""
        if self.processes is not None:
            units, gradients = pipeline.store.units, pipeline.gradients
            self.processes.average([unit.parameters for unit in units], gradients.get, gradients.replace)

    def average_by_hand(self) -> None:
        """Manual optimization: averages what is in ``.grad`` over the processes."""
        module = self.lightning_module
        if self.processes is not None and module is not None and not module.automatic_optimization:
            parameters = [[parameter] for parameter in module.parameters()]
            self.processes.average(parameters, lambda p: p.grad, lambda p, gradient: setattr(p, "grad", gradient))

    def _device_count(self) -> int:
        return len(self.devices) if self.devices else max(1, len(self.parallel_devices or ()))

    @property
    def _hardware(self) -> list[torch.device]:
        """The devices with memory of their own, if there are any."""
        if self.devices is not None:
            return [device.torch_device for device in self.devices]
        return [device for device in self.parallel_devices or () if device.type != "cpu"]

    def _make_devices(self, count: int, threads: int) -> list[Device]:
        if not self._hardware:
            return [CpuDevice(index, threads) for index in range(count)]
        collect()  # what a pipeline before this one has left on the devices
        peers: dict[torch.device, AcceleratorDevice] = {}
        pinning = Pinning(self.pin_memory, most_to_pin(), rank_zero_warn)
        monitor = None if self._trainer is None else _monitor_of(self._trainer)
        timed = monitor is not None and monitor.metrics
        return [
            AcceleratorDevice(hardware_of(device), peers, pinning=pinning, times_uploads=timed)
            for device in self._hardware
        ]

    def _open(self) -> Pipeline:
        """Builds the pipeline, at the first batch: what hooks did to the model before counts."""
        module = self.lightning_module
        trainer = self._trainer
        assert module is not None and trainer is not None
        self._splitter = BatchSplitter(
            module,
            self.split,
            self.loss_weight,
            self._wanted(),
            mb.own_split(module, _data_module(trainer)),
            self.precision_plugin.train_step_context,
            self.settle,
        )
        check_optimizers(module, self.optimizers, staleness=self.staleness, processes=self.world_size)
        simulated = self.devices is not None
        check_module(module, simulated=simulated)
        mixed = isinstance(self.precision_plugin, MixedPrecision)
        need, available = host_need(module, self.optimizers, mixed=mixed, staleness=self.staleness), available_memory()
        check_fits(need, available, staleness=self.staleness, halves=_holds_full_precision(module))
        count = self._device_count()
        self._threads_before = torch.get_num_threads()
        threads = max(1, self._threads_before // count)
        if not self._hardware and count > (cores := _cores()):
            rank_zero_warn(
                f"roundpipe: {count} virtual devices share {cores} core{'s' if cores > 1 else ''}, so they cannot all"
                f" work at the same time: the numbers are right, but training is no faster than with devices={cores}."
            )
        restored = self._restored or {}
        self._seed = restored.get("seed", program_seed())
        scheduler = Scheduler(self.schedule, count, self.lanes)
        scheduler.check(self._wanted())
        devices = self._make_devices(count, threads)
        pipeline = Pipeline(
            module,
            devices,
            layers=self.layers,
            staleness=self.staleness,
            seed=derive_seed(self._seed, self.global_rank) if self.is_distributed else self._seed,
            first_step=restored.get("step", 0),
            compile_settings=self._compile_settings,
            scheduler=scheduler,
            memory_limit=memory_limit(self.device_memory, devices, rank_zero_warn),
            refuses=self.device_memory != "auto",
            keeps_graphs=self.recompute == "none",
        )
        self._started, self._validation_seconds = time.perf_counter(), 0.0
        self._pipeline = pipeline  # from now on its threads are closed, whatever comes
        if self.staleness and "stale" in restored:
            pipeline.store.load_stale_values(restored["stale"])
        pipeline.on_serial = _say_serial
        self._worker = OptimizerWorker(
            pipeline.store,
            pipeline.gradients,
            pipeline.monitor,
            pipeline.unit_order(),
            1,
            partial(self._average, pipeline) if self.processes is not None else None,
            pipeline.devices[0].in_thread,
        )
        self._worker.skip_to(pipeline.store.enqueued)
        if self.timeline is not None:
            self._timeline_writer = TimelineWriter(
                self.timeline.of_process(self.global_rank), pipeline, self._worker, rank_zero_info, rank_zero_warn
            )
        self._between = UseBetweenBatches(pipeline.store.owns, self.settle)
        self._restored = self._last_state = None
        self._splitter.announce()
        self._fresh_metrics = {}
        self._communicates = False
        self._gradients_unused = False
        self.steps_in_background = self._may_step_in_background(trainer)
        if simulated and any(layer.compiled is not None for layer in pipeline.layers):
            rank_zero_warn(
                "roundpipe: on simulated devices layers run uncompiled: torch.compile takes no tensors of these. The"
                " numbers are those of uncompiled code."
            )
        kind = "simulated" if simulated else self._hardware[0].type if self._hardware else "virtual CPU"
        share = "" if self._hardware else f" of {threads} core{'s' if threads > 1 else ''} each"
        rank_zero_info(
            f"roundpipe: {count} {kind} device{'s' if count > 1 else ''}{share}, {len(pipeline.layers)} layers,"
            f" staleness {self.staleness}"
        )
        if shows_summary(trainer):
            rank_zero_info(as_text(summary(pipeline, need, available)))
        return pipeline

    def _close(self) -> None:
        pipeline, worker = self._pipeline, self._worker
        if worker is not None:
            with suppress(Cancelled):  # steps of batches before a failed one are still made
                worker.wait_idle()
        state = self._state()
        if self._between is not None:
            self._between.end()
        self._pipeline = self._worker = self._batch = self._between = None
        self.steps_in_background = False
        if pipeline is None:
            return
        if self._spared is not None:
            self._spared.release()
            self._spared = None
        self._report = self._make_report(pipeline)
        self._last_state = state
        self._lost_step = any(unit.done < pipeline.store.enqueued for unit in pipeline.store.units)
        pipeline.close()
        if worker is not None:
            worker.close()
        if self._timeline_writer is not None:
            self._timeline_writer.close()
            self._timeline_writer = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _may_step_in_background(self, trainer: "pl.Trainer") -> bool:
        if not self.background_step:
            return False
        optimizer = self.optimizers[0]
        reasons = hooks_that_look(trainer)
        if needs_closure(optimizer) or holds_parameters_elsewhere(optimizer):
            reasons.append(f"the optimizer {type(optimizer).__name__}")
        if has_step_hooks(optimizer):
            reasons.append("a hook on the optimizer's step")
        plugin = self.precision_plugin
        if not (isinstance(plugin, RoundPipePrecision) and plugin.handles_in_background(optimizer)):
            reasons.append(f"the precision plugin {type(plugin).__name__}")
        module = trainer.lightning_module
        if any(parameter._post_accumulate_grad_hooks for parameter in module.parameters()):
            reasons.append("a parameter's post-accumulate-grad hook")
        scripts = (part for part in module.modules() if isinstance(part, torch.jit.ScriptModule))
        if any(parameter.requires_grad for script in scripts for parameter in script.parameters()):
            reasons.append("a script (torch.jit)")
        if reasons:
            rank_zero_info(
                "roundpipe: the optimizer steps in line, not in the background, because of "
                + ", ".join(reasons)
                + ", which may use weights or gradients right after the batch."
            )
        return not reasons

    # -- the training step -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the step's forward in microbatches; their backward goes on when this returns."""
        module, trainer = self.lightning_module, self._trainer
        assert module is not None and trainer is not None
        if self._between is not None:
            self._between.end()  # the step waits for what it needs
        if self.processes is not None:
            self.processes.follow_changed_buffers(module, self._wait_backward)
        skips_backward = trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward  # last epoch of SWA
        if not module.automatic_optimization or skips_backward:
            self.settle()
            return super().training_step(*args, **kwargs)
        if trainer.fit_loop.epoch_loop.batch_idx == 0:
            self._follow_replaced()
        pipeline = self._pipeline or self._open()
        assert self._between is not None
        self._begin_window(pipeline, trainer)
        if self._spared is None and pipeline.batches >= _FEW_BATCHES:
            self._spared = SparedObjects()
        if self._timeline_writer is not None:
            self._timeline_writer.follow()
        start = time.perf_counter()
        with pipeline.devices[0].in_thread():
            result = self._train(pipeline, *args, **kwargs)
        if pipeline.recording is not None:
            pipeline.recording.add_main("training_step", start)
        return result

    def _follow_replaced(self) -> None:
        """Builds the pipeline anew where modules or parameters were replaced between two epochs, by pruning say.

        With staleness 1 the values of one step before would be those of other parameters: it is refused as ever.
        """
        if self._pipeline is not None and not self.staleness and self._pipeline.replaced():
            self.settle()
            self._close()
            self._restored = self._last_state

    def _train(self, pipeline: Pipeline, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The training step by the pipeline."""
        module, trainer = self.lightning_module, self._trainer
        assert module is not None and trainer is not None and self._between is not None and self._splitter is not None
        batch, rest = args[0], args[1:]
        training_step = _uncompiled(module.training_step)  # if the module is compiled as a whole, its layers are
        splitter, loop = self._splitter, trainer.fit_loop.epoch_loop
        if splitter.is_to_look(pipeline.batches, begins_epoch=loop.batch_idx == 0):
            with recording_nothing(trainer.profiler), logging_nothing(trainer):  # type: ignore[attr-defined]
                splitter.look(pipeline, batch, lambda part: loss_in(training_step(part, *rest, **kwargs)))
        pieces, sizes, weights = splitter.split(batch)
        bring_down = partial(pipeline.devices[0].bring_down, copy=True)
        logging = StepLogging(
            module, sizes if any(sizes) else weights, self._fresh_metrics, self.before_collective, bring_down
        )
        splits_calls = splitter.way == "model"
        profiling = StepProfiling(trainer.profiler, pipeline.interleaves(), pipeline.run_serially)  # type: ignore[attr-defined]
        outputs: list[Any] = [None] * len(pieces)
        losses: list[Tensor | None] = [None] * len(pieces)
        plugin = self.precision_plugin
        # The default dtype belongs to the whole process; autocast to each thread.
        process_wide = isinstance(plugin, (DoublePrecision, HalfPrecision))

        def step_of(index: int, piece: Any) -> Step:
            def step() -> Tensor | None:
                current_microbatch.set(index)
                with nullcontext() if process_wide else plugin.train_step_context():
                    output = training_step(piece, *rest, **kwargs)
                loss = loss_in(output)
                if self._hardware:  # nobody waits for it yet
                    output = map_tree(lambda leaf: bring_down(leaf) if isinstance(leaf, Tensor) else leaf, output)
                outputs[index] = output
                losses[index] = _detached(loss_in(output))
                # Without anything that counts (no token has a label) a mean is not a number, and the sums go on.
                return loss if weights[index] else None

            return step

        if process_wide:  # nor may the optimizer make its state with it
            self.settle_steps()
        scale, steps = 1.0 / trainer.accumulate_grad_batches, pipeline.store.enqueued
        with (
            plugin.train_step_context() if process_wide else nullcontext(),
            logging.recording() if len(pieces) > 1 else logging.passing_on(),
            self._phase("forward"),
            profiling.recording() if len(pieces) > 1 or splits_calls else nullcontext(),
        ):
            self._batch = pipeline.start_batch(
                [step_of(index, piece) for index, piece in enumerate(pieces)],
                weights,
                lambda: scale * self._loss_scale(steps),
                deferred=self._waits_for_backward(module),
                values_changed=self._may_have_changed(),
                rounds_gradients=self._rounds_gradients(trainer),
            )
            self._layers_log = logging if logging.layers_log else None
            if process_wide or ((self._communicates or logging.layers_log) and not self._batch.deferred):
                pipeline.wait_backward()  # the recompute must see the same default dtype, and what stands in for `log`
        if self._hardware:
            for tensor in tensors(outputs):
                arrived(tensor)
            bring_home(module, bring_down)
        if len(pieces) > 1:
            self._tell_of_none([loss for loss, weight in zip(losses, weights, strict=True) if weight])
            logging.replay(losses, weights)
        if any(loss is not None for loss in self._batch.losses):
            pipeline.take_own_gradients()
        if self._batch.deferred and self.steps_in_background:
            self._between.begin()  # the user's own backward may use parameters that the batch did not
        return self._merge_outputs(outputs, self._batch, sizes, weights)

    def _waits_for_backward(self, module: "pl.LightningModule") -> bool:
        """Whether something happens between forward and backward that the backward must not overtake."""
        if is_overridden("backward", module) or is_overridden("optimizer_zero_grad", module):
            return True
        return not self.steps_in_background and looks_before_backward(module.trainer)

    def _may_have_changed(self) -> bool:
        """Whether the user's code may have changed parameters since the last batch; if so, no step is pending."""
        settled, self._settled = self._settled, False
        return settled or not self.steps_in_background

    def _begin_window(self, pipeline: Pipeline, trainer: "pl.Trainer") -> None:
        """Where Lightning will zero the gradients, those of batches that no step has used are dropped. Else the next
        batch adds to what is in ``.grad``, which hooks may have replaced, if the gradients are there."""
        if is_overridden("optimizer_zero_grad", trainer.lightning_module):
            return
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if not first and not self.steps_in_background:
            self._adopt_gradients()
        if first and self._gradients_unused:
            self._wait_backward()
            for unit in pipeline.store.units:
                pipeline.gradients.hand_over(unit)
        self._gradients_unused = True

    def _wanted(self) -> int:
        return self.microbatches or self._device_count() + 1

    def _tell_of_none(self, losses: Sequence[Tensor | None]) -> None:
        """Warns once where some of the microbatches that count have no loss, and others have."""
        missing = sum(loss is None for loss in losses)
        if self._told_of_none or not 0 < missing < len(losses):
            return
        self._told_of_none = True
        rank_zero_warn(
            f"roundpipe: training_step returned None for {missing} of {len(losses)} microbatches of a batch: only these"
            " are left out, and the others count with their own weights. In plain Lightning training_step sees the"
            " whole batch, and where it returns None, all of it is left out. To have that, set split='model'."
        )

    def _merge_outputs(
        self, outputs: list[Any], batch: Batch, sizes: Sequence[int], weights: Sequence[float]
    ) -> STEP_OUTPUT:
        value = mb.merge_losses(batch.losses, weights)
        loss = None
        if value is not None:
            loss = _BatchLoss.apply(torch.zeros((), requires_grad=True), value, self, batch)
        if not any(isinstance(output, Mapping) for output in outputs):
            return loss
        extras = [_without_loss(output) for output in outputs if isinstance(output, Mapping)]
        kept = [size for size, output in zip(sizes, outputs, strict=True) if isinstance(output, Mapping)]
        shares = [weight for weight, output in zip(weights, outputs, strict=True) if isinstance(output, Mapping)]
        if loss is None:
            return None
        return {"loss": loss, **mb.merge_outputs(extras, kept, shares)}

    def _loss_scale(self, steps: int) -> float:
        """After so many steps, which may still change it."""
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is None or not isinstance(plugin, RoundPipePrecision):
            return 1.0
        if self._worker is not None:
            self._worker.wait_for(steps)
        return plugin.loss_scale()

    def loss_backward(self, batch: Batch, gradient: Tensor) -> None:
        """Called when autograd comes to the batch's loss."""
        given = float(gradient)
        if batch.deferred:
            if not self.steps_in_background or is_overridden("optimizer_zero_grad", self.lightning_module):
                self._adopt_gradients()
            batch.release(given)
            if self._pipeline is not None and (
                batch.records or self._communicates or self._layers_log or self._pipeline.draws_on_the_host()
            ):
                with self._layers_log.passing_on() if self._layers_log is not None else nullcontext():
                    self._wait_backward()
            return
        expected = batch.scale()
        if abs(given - expected) > 1e-6 * abs(expected):
            raise RuntimeError(
                f"The loss that training_step returned is backpropagated with a factor of {given}, but {expected} was"
                " expected, and the pipeline's backward has begun with that. Scale the loss within training_step, or"
                " override LightningModule.backward: the pipeline then waits for it."
            )

    def will_step_in_background(self) -> bool:
        """Whether optimizer steps are to be handed in. Builds the pipeline if the first batch is still to come."""
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization and self._pipeline is None:
            self._open()
        return self.steps_in_background

    # -- the optimizer step ----------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """After ``loss.backward()``: without a background step, gradients are put where Lightning has them."""
        pipeline, trainer = self._pipeline, self._trainer
        if pipeline is None:
            self.average_by_hand()
            return
        pipeline.check()
        pipeline.add_own_gradients()
        if self.steps_in_background:
            assert self._between is not None
            self._between.begin()
            return
        self._wait_backward()
        if trainer is not None and not trainer.fit_loop._should_accumulate():
            self._average(pipeline)
        for parameter in pipeline.store.parameters():
            gradient = pipeline.gradients.get(parameter)
            if gradient is not None:
                parameter.grad = gradient
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)
        self._backward_done = time.perf_counter()

    def _rounds_gradients(self, trainer: "pl.Trainer") -> bool:
        """Whether nothing comes between this batch's gradients and their optimizer step."""
        plugin = self.precision_plugin
        return (
            self.steps_in_background
            and self.processes is None
            and isinstance(plugin, RoundPipePrecision)
            and plugin.before_step(trainer.lightning_module) is None
            and not trainer.fit_loop._should_accumulate()
        )

    def _adopt_gradients(self) -> None:
        """The user zeroes gradients (or does not) in their own way: what is in ``.grad`` now is added to."""
        pipeline = self._pipeline
        assert pipeline is not None
        for unit in pipeline.store.units:
            pipeline.gradients.hand_over(unit)
            for parameter in unit.parameters:
                if parameter.grad is not None:
                    pipeline.gradients.adopt(parameter, parameter.grad)

    def submit_step(
        self, optimizer: Optimizer, before_step: BeforeStep | None, after_step: Callable[[], None] | None = None
    ) -> None:
        """Hands a step to the background worker.

        Raises:
            RuntimeError: Hooks have been registered on the optimizer's step meanwhile.
        """
        assert self._worker is not None and self._pipeline is not None and self._batch is not None
        assert self._between is not None
        self._pipeline.check()
        if has_step_hooks(optimizer):
            raise RuntimeError(
                f"A hook has been registered on the step of {type(optimizer).__name__} since the first batch began. It"
                " may read gradients, which a step in the background does not show it. Register it in"
                " configure_optimizers, or use RoundPipeStrategy(background_step=False)."
            )
        if self._may_have_changed():  # in an overridden backward, say: the step is not pending yet
            self._between.end()
            self._pipeline.store.refresh(values=True)
            self._between.begin()
        self._worker.order = self._pipeline.unit_order()
        gradients = self._batch.gradients
        assert isinstance(gradients, BatchGradients)
        half = self._pipeline.store.travels_in_half
        job = StepJob(optimizer, gradients, before_step, after_step, in_half_precision=half)
        job.recording = self._batch.recording
        self._worker.submit(job)
        self._gradients_unused = False
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for

    def after_step_in_line(self) -> None:
        """After the optimizer stepped on the main thread: publishes, and starts the gradient sums anew."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        pipeline.wait_backward()
        self._gradients_unused = False
        pipeline.store.enqueued += 1
        for unit in pipeline.store.units:
            pipeline.gradients.hand_over(unit)  # `.grad` stays readable until the next batch
            pipeline.store.publish(unit)
        assert self._worker is not None
        self._worker.skip_to(pipeline.store.enqueued)
        if pipeline.recording is not None:
            pipeline.recording.add_main("optimizer step", self._backward_done, of_step=True)

    def settle_steps(self) -> None:
        """Waits until every optimizer step handed in is done."""
        if self._pipeline is not None and self._worker is not None:
            with self._phase("optimizer_wait"):
                self._pipeline.until(self._worker.wait_idle)

    def settle(self) -> None:
        """Waits until every backward and optimizer step of finished batches is done.

        Raises:
            BaseException: What failed in one of them. But only once: whoever handles the error may save a checkpoint,
                or go on, with what the steps before have left.
        """
        if self._pipeline is not None and self._pipeline.failure_told:
            self._close()
        try:
            if self._backward_to_come():
                self.settle_steps()
            elif self._pipeline is not None and self._worker is not None:
                self._wait_backward()
                self.settle_steps()
                assert self._between is not None
                self._between.end()
                self._settled = True
        except BaseException:
            self._call_validation_off()
            raise

    def _call_validation_off(self) -> None:
        """For an error of training that comes to light when validation begins: it finds all as training has it."""
        trainer = self._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()  # no longer in eval mode
            trainer.training = True

    def _backward_to_come(self) -> bool:
        """Whether the main thread itself has still to begin the backward of the last batch."""
        return self._batch is not None and not self._batch.released

    # -- state -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.settle()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self.settle()
        if self._lost_step and self._pipeline is None:
            rank_zero_warn(
                "roundpipe: the error arose in the backward or the optimizer step of a batch that the Trainer counts as"
                " done: the checkpoint has the weights before that step, and a resumed run goes on after it."
            )
        if (state := self._state()) is not None:
            checkpoint[_CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.settle()
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.settle()
        super().load_optimizer_state_dict(checkpoint)

    def on_train_end(self) -> None:
        self.settle()
        super().on_train_end()

    def on_validation_start(self) -> None:
        self.settle()
        self._validation_started = time.perf_counter()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._validation_seconds += time.perf_counter() - self._validation_started

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """The main thread waits for the pipeline. Profilers and the timeline show how long. No name is one that
        Lightning gives, such as ``backward``: to profilers an action is open once."""
        trainer, start = self._trainer, time.perf_counter()
        profiler: Any = None if trainer is None else trainer.profiler  # type: ignore[attr-defined]
        with nullcontext() if profiler is None else profiler.profile(f"[Strategy]{type(self).__name__}.{name}"):
            yield
        if self._pipeline is not None and self._pipeline.recording is not None:
            self._pipeline.recording.add_main(name, start)

    def _state(self) -> dict[str, Any] | None:
        """What a resumed run needs besides Lightning's own state. After fit, that of its end."""
        pipeline = self._pipeline
        if pipeline is None:
            return self._last_state
        unfinished = self._backward_to_come() or (pipeline.monitor.failure is not None and pipeline.batch is not None)
        state: dict[str, Any] = {"seed": self._seed, "step": pipeline.step - unfinished}  # it begins with that batch
        if self.staleness and pipeline.store.enqueued:
            state["stale"] = pipeline.store.stale_values()
        return state

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        self._close()  # where a tuner goes back to what was before its trials
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored = self._last_state = checkpoint.get(_CHECKPOINT_KEY)
        self._lost_step = False
        return checkpoint

    def on_train_start(self) -> None:
        self._close()  # where a tuner has run the loop before: with other callbacks, and perhaps out of memory
        super().on_train_start()

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the present fit, from its first batch on."""
        return self._pipeline

    @property
    def way(self) -> tuple[str, Any]:
        """How a batch is split, and its losses are weighed."""
        splitter = self._splitter
        return (self.split, self.loss_weight) if splitter is None else (splitter.way, splitter.loss_weight)

    def report(self) -> PipelineReport:
        """Layers, stages and devices of the present fit, or of the last one.

        Raises:
            RuntimeError: When nothing has been trained yet.
        """
        if self._pipeline is not None:
            return self._make_report(self._pipeline)
        if self._report is None:
            raise RuntimeError("There is nothing to report before the first training batch.")
        return self._report

    def _make_report(self, pipeline: Pipeline) -> PipelineReport:
        wall_seconds = time.perf_counter() - self._started
        return make_report(pipeline, wall_seconds, wall_seconds - self._validation_seconds)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(
            "roundpipe", cls, description="CPU-parameter round-robin pipeline; the same numbers as on one device"
        )
        strategy_registry.register(
            "roundpipe_async",
            cls,
            description="The same with parameters one optimizer step behind: the step costs no time",
            staleness=1,
        )


class _BatchLoss(torch.autograd.Function):
    """The batch's loss as Lightning sees it. Its backward is the pipeline's, which is under way or let begin by it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, strategy: RoundPipeStrategy, batch: Batch) -> Tensor:
        ctx.strategy, ctx.batch = strategy, batch
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if ctx.batch is None:
            raise RuntimeError("The pipeline's backward of a batch can run only once.")
        if torch.is_grad_enabled():
            raise RuntimeError(
                "loss.backward(create_graph=True) asks for second derivatives, which are not supported through layers"
                " of the pipeline. Train with strategy='auto'."
            )
        strategy, batch = ctx.strategy, ctx.batch
        ctx.strategy = ctx.batch = None
        strategy.loss_backward(batch, gradient)
        return (None, None, None, None, None)


def loss_in(output: Any) -> Tensor | None:
    """The loss in what training_step returned, with Lightning's own words where there is none."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if loss is None:
            raise MisconfigurationException(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
            )
        return loss
    if output is not None and not isinstance(output, Tensor):
        raise MisconfigurationException(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step will"
            " be skipped)."
        )
    return output


def _detached(loss: Tensor | None) -> Tensor | None:
    return loss if loss is None or not loss.requires_grad else loss.detach()


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = compiled_function(function)
    return function if compiled is None else compiled[1]


def _without_loss(output: Mapping[str, Any]) -> dict[str, Any]:
    extras = {key: value for key, value in output.items() if key != "loss"}
    return map_tree(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, extras)


def _monitor_of(trainer: "pl.Trainer") -> PipelineMonitor | None:
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, PipelineMonitor)), None)


def _data_module(trainer: "pl.Trainer") -> "pl.LightningDataModule | None":
    """Where the batches come from, if from a data module: a Trainer that is used again still has the one before."""
    data_module: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
    source: Any = trainer.fit_loop._data_source.instance
    return data_module if source is data_module else None


def _holds_full_precision(module: torch.nn.Module) -> bool:
    return any(parameter.is_floating_point() and parameter.element_size() > 2 for parameter in module.parameters())


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say_serial(reason: str) -> None:
    rank_zero_info(
        f"roundpipe: the microbatches run one after the other, because {reason}. Every result is right, but the devices"
        " do not work at the same time."
    )


def _let_profiler_see_threads(trainer: "pl.Trainer") -> None:
    """PyTorch's profiler records the thread that it was started in, unless it is told otherwise."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set outside of its __init__
    if isinstance(profiler, PyTorchProfiler):
        profiler._profiler_kwargs.setdefault("experimental_config", _ExperimentalConfig(profile_all_threads=True))
