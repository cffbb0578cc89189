"""Layer calls: run forward keeping only the inputs, linked into autograd's graph, and run again for the backward.

A call is one node of the caller's autograd graph. So autograd itself orders the backward of the code between layers and
of the calls, with skip connections, shared layers, hooks and several backward passes, exactly as it would without us.
"""

import contextvars
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.out_of_memory import asking_for
from lightning_roundpipe.pipeline.arguments import Structure
from lightning_roundpipe.pipeline.autocast import AutocastState
from lightning_roundpipe.pipeline.compiling import CompiledKind
from lightning_roundpipe.pipeline.device_sums import DeviceSums
from lightning_roundpipe.pipeline.escapes import RecomputeError, escape_text, refuse_escapes, saving_nothing
from lightning_roundpipe.pipeline.fingerprint import Fingerprint
from lightning_roundpipe.pipeline.lent_parameters import LentParameters
from lightning_roundpipe.pipeline.mixed import CastWatch
from lightning_roundpipe.pipeline.nodes import LEAF, CallOwner, call_node, edges_of, enter_call, has_graph, reached_by
from lightning_roundpipe.pipeline.on_device import OnDevice
from lightning_roundpipe.pipeline.replica import AttributeState, Layer, Replica
from lightning_roundpipe.pipeline.rng import RandomState, seed_all
from lightning_roundpipe.pipeline.runs import Escaped, Mode, Run
from lightning_roundpipe.pipeline.saved import Complete, Graph, MissingTensors, saving_all
from lightning_roundpipe.pipeline.watching import contents_of_function, copy_of, gradients_in, same
from lightning_roundpipe.pipeline.weight_gradients import DeferredWeights
from lightning_roundpipe.state.sharing import memory_of, share_memory, version_of

_thread = threading.local()


def runs_again() -> bool:
    """Whether this thread is in a layer's recompute: what is done there has been done before."""
    return getattr(_thread, "runs_again", False)


def in_layer() -> bool:
    """Whether this thread is in a layer's code."""
    return getattr(_thread, "in_layer", False)


class Call:
    """One execution of a layer by one microbatch, and what is needed to run it again.

    Args:
        layer: The layer.
        label: Names the call in errors.
        arguments: The positional arguments, those given by name, and attributes that are inputs, taken apart. Their
            leaves are dropped once saved.
        names: Of the arguments given by name.
        state: The layer's attributes before the call.
        parameters: The tensors to compute with.
        record: Warm-up: find out the layer's traits.
    """

    # What most calls never set is the class's: a call is made for each layer of each microbatch.
    seed: int | None = None
    random_state: RandomState | None = None
    device_random_state: Tensor | None = None
    merge_norm_statistics = False
    compiled: CompiledKind | None = None
    kept: Graph | None = None
    """Of the run that is not repeated."""
    deferred: DeferredWeights | None = None
    """Collects weight gradients that the backward leaves for later."""
    leaf_count = 0
    done = False
    fingerprints: list[Fingerprint] | None = None
    position: int | None = None
    stays = False
    """Whether its inputs are kept where it runs, and not in host memory."""
    _lent: LentParameters | None = None
    """Those of that graph, where it outlasts its stage on a device with memory of its own."""
    _incomplete: Graph | None = None
    """Of the first run, where only what is missing in it is computed again."""
    _missing: MissingTensors | None = None
    _parameter_kinds: Sequence[tuple[torch.dtype, torch.Size]] = ()
    _half: dict[int, torch.dtype] | None = None
    _watch: CastWatch | None = None
    """Of the first run, while it lasts."""
    _replica: Replica | None = None
    """In use until the backward is done: a checkpoint inside the layer runs its modules once more."""
    _buffers: list[dict[str, Tensor | None]] | None = None
    _state_versions: Sequence[tuple[int, int]] = ()
    _norms_aside: frozenset[int] = frozenset()

    def __init__(
        self,
        layer: Layer,
        label: str,
        arguments: Structure,
        names: tuple[str, ...],
        state: AttributeState,
        parameters: Sequence[nn.Parameter],
        *,
        record: bool,
    ) -> None:
        self.layer = layer
        self.label = label
        self.arguments = arguments
        self.names = names
        self.state = state
        self.parameters = parameters
        self.record = record
        self.is_new = record or not layer.traits.known
        """Whether the layer has not shown yet what it changes, so that copies are made of everything."""
        self.autocast = AutocastState()
        self.context = contextvars.copy_context()
        self.gradient_inputs: list[int] = []
        self.input_devices: list[torch.device] = []
        self.differentiable: list[int] = []
        self.deferred_gradients: list[tuple[Tensor, Tensor]] = []
        self.reached: list[nn.Parameter] = []
        """Parameters that the outputs depend on and that are not the layer's, nor arguments."""
        self.has_state = layer.has_buffers or bool(state.tensors) or bool(state.containers) or bool(state.holding)
        """Whether there is anything that the call might write."""
        self._saved: list[Any] = []
        self._copies: dict[tuple[int, str], Any] = {}
        self._versions: list[tuple[int, Tensor, int]] = []
        self._aliases: list[tuple[Tensor, int]] = []

    # -- forward ---------------------------------------------------------------------------------------------------

    def run(self, device: Device, mode: str) -> Run:
        """Runs the layer for the first time and keeps what :meth:`backward` needs."""
        layer, traits = self.layer, self.layer.traits
        leaves = self.arguments.leaves
        if mode == Mode.PLAIN:
            self.is_new = self.record  # nothing will be run again
        else:
            self.gradient_inputs = [
                i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            self.input_devices = [leaves[i].device for i in self.gradient_inputs]
        self._save_inputs(device, leaves, mode)
        if self.has_state:
            taken, reading = layer.norms(training=True), layer.norms(training=False)
            self._norms_aside = taken if self.merge_norm_statistics else frozenset()
            versions, sizes = layer.state_versions(self.state, self._norms_aside), self.state.sizes()
            if self.record:
                traits.writes_state |= traits.state_versions not in (None, layer.state_versions(self.state))
            # Statistics that are read here may be updated by another call of the same BatchNorm before the recompute.
            read_later = self.merge_norm_statistics and bool(reading)
            if mode == Mode.DROP and (self.is_new or traits.writes_state or read_later):
                changed_attributes = self.state.holding if self.is_new else traits.changed_attributes
                self._buffers, self._copies = layer.copy_buffers(), self.state.copies(changed_attributes)
            held = self.state.contents() if self.is_new else {}
        hooks = layer.inner_pre_hooks() if self.record else []
        kept_by_hooks = [contents_of_function(hook) for _, hook in hooks]
        self._parameter_kinds = [(leaf.dtype, leaf.shape) for leaf in self.parameters]
        half = self.autocast.half_type(device.autocast)
        watch = self._watch = CastWatch(half) if self.record and half is not None else None
        if watch is None:  # which sees nothing of compiled code
            self.compiled = layer.compiled_for_call(merge_norm_statistics=self.merge_norm_statistics)
        whole = self.is_new or traits.repeats_whole or self.compiled is not None or traits.compiles
        if mode == Mode.DROP and device.is_host and not whole:
            self._missing = MissingTensors(escape_text(self.label))
        self._lent = LentParameters(device.torch_device) if mode == Mode.LEND else None
        replica = layer.borrow(watched=self.record and self.compiled is None)
        try:
            with watch or nullcontext():
                run = self._execute(replica, device, self._at_hand(device, leaves), layer.buffers(), mode, first=True)
            self._check_structure(replica)
            for (module, hook), before in zip(hooks, kept_by_hooks, strict=True):
                if not same(contents_of_function(hook), before):
                    raise RecomputeError(
                        f"{self.label}: a forward pre-hook on {type(module).__name__} inside it keeps something outside"
                        " of the layer. It runs again in the recompute, and on a stand-in for the module. Put the hook"
                        " on the layer itself, use a forward hook, or keep the layer out of the pipeline with"
                        " RoundPipeStrategy(layers=...)."
                    )
        except BaseException:
            layer.give_back(replica)
            raise
        # Nothing requires a gradient, but for parameters of others that the layer turns out to use past its arguments.
        linked = [leaf for i, leaf in enumerate(run.leaves) if i not in run.returned and has_graph(leaf)]
        reaches_out = mode == Mode.PLAIN and bool(linked)
        if reaches_out and not torch.is_grad_enabled() and any(leaf.grad_fn is not None for leaf in linked):
            layer.give_back(replica)
            raise RecomputeError(
                f"{self.label}: gradients are disabled where it is called, and enabled again inside it. Call it with"
                " gradients enabled, or keep the layer out of the pipeline with RoundPipeStrategy(layers=...)."
            )
        keeps = mode in (Mode.KEEP, Mode.LEND) or reaches_out
        if keeps:
            self._replica = replica
        else:
            layer.give_back(replica)
        self._watch = None
        if watch is not None and half is not None:
            self._half = dict.fromkeys(watch.cast_once(), half)
            if mode != Mode.DROP:  # no recompute that could confirm it
                self._note_half({})
        if self.has_state:
            self._state_versions = layer.state_versions(self.state, self._norms_aside)
            self._note_changed_attributes(held)
            changed = versions != self._state_versions or sizes != self.state.sizes() or bool(traits.changed_attributes)
            if changed and not traits.writes_state:
                self._found_state_write(mode)
            traits.state_versions = layer.state_versions(self.state) if self.record else None
        self._check_inputs_after_run()
        if mode == Mode.DROP:
            traits.dropped = True
        if self.is_new and mode == Mode.DROP:
            self.fingerprints = [Fingerprint.of(leaf) for leaf in run.leaves if isinstance(leaf, Tensor)]
        self.leaf_count = len(run.leaves)
        plain = self._trace(run)
        if mode == Mode.DROP and not self.differentiable:  # so there is no recompute that would see them changed
            device.release_inputs(self._saved)
            self._saved = []
        if keeps:
            self.kept = Graph([run.leaves[i] for i in self.differentiable], run.edges, run.parameters)
        elif self._missing is not None and plain and run.is_plain:
            outputs = [get_gradient_edge(run.leaves[i]) for i in self.differentiable]
            self._incomplete = Graph(outputs, run.edges, run.parameters)
        if not device.is_host:
            device.outlasting(run.leaves if self.kept is None else [*run.leaves, *run.parameters])
            if mode == Mode.DROP:
                run.let_go(self.differentiable)
            elif self._lent is not None:
                self._lent.leave()
        return run

    def _trace(self, run: Run) -> bool:
        """Finds which outputs may have a gradient, and which inputs they depend on. Returns whether there is nothing
        but torch's own operations in between."""
        unchanged = {i for i, argument in run.returned.items() if argument not in run.changed}
        self.differentiable = [i for i, leaf in enumerate(run.leaves) if i not in unchanged and has_graph(leaf)]
        if not self.differentiable:
            return True
        reached = reached_by([run.leaves[i] for i in self.differentiable], run.edges)
        run.used = reached.entry
        self._find_foreign_parameters(run, reached.leaves, reached.calls)
        return not reached.has_python

    def _note_changed_attributes(self, before: dict[tuple[int, str], list[Any]]) -> None:
        """Finds the lists, dicts and objects in which the call of a new layer has changed something."""
        if not self.is_new:
            return
        traits, now = self.layer.traits, self.state.contents()
        found = {at for at, contents_before in before.items() if not same(now[at], contents_before)}
        traits.changed_attributes |= found
        traits.gradient_attributes |= {at for at in found if gradients_in(self.state.dicts[at[0]][at[1]])}
        for at in before:
            if at not in found and at not in self.state.containers:
                self._copies.pop(at, None)

    def link(self, run: Run, owner: "CallOwner", token: Tensor) -> Escaped:
        """Makes the outputs of a run part of the caller's autograd graph."""
        leaves, given = run.leaves, self.arguments.leaves
        new = list(leaves)
        if self.differentiable:
            # What the outputs do not depend on gets no gradient at all, as without us, rather than zeros.
            inputs = [given[i] if n in run.used else given[i].detach() for n, i in enumerate(self.gradient_inputs)]
            outputs = call_node(self, owner, [leaves[i] for i in self.differentiable], token, *inputs)
            for i, output in zip(self.differentiable, outputs, strict=True):
                new[i] = output
        for i, argument in run.returned.items():  # the caller gets its own tensor back, as without us
            if argument in run.changed:
                _put_in_history(given[argument], new[i])
            new[i] = given[argument]
        self._watch_aliases([new[i] for i in self.differentiable], given)
        self.arguments.leaves = []  # the saved inputs are all that is kept
        escaped = Escaped(run.structure.tree(new))
        run.structure.leaves = []
        if self.record:
            self.layer.traits.escapes |= escaped.ways(self.layer)
        return escaped

    def _watch_aliases(self, outputs: Sequence[Tensor], given: Sequence[Any]) -> None:
        """Outputs that share memory with one another or with arguments: autograd knows of it within the call only."""
        tensors = [*outputs, *(leaf for leaf in given if isinstance(leaf, Tensor))]
        if not share_memory(tensors):
            return
        sharing: dict[int, dict[int, Tensor]] = {}
        for tensor in tensors:
            if (memory := memory_of(tensor)) is not None:
                sharing.setdefault(memory, {})[id(tensor)] = tensor
        of_call = {id(output) for output in outputs}
        self._aliases = [
            (version_of(tensor), tensor._version)
            for tensors in sharing.values()
            if len(tensors) > 1 and not of_call.isdisjoint(tensors)
            for tensor in tensors.values()
        ]

    def check_aliases(self) -> None:
        """After the step.

        Raises:
            RecomputeError: When a tensor was changed in place after the call that shares memory with its outputs.
        """
        if any(counter._version != version for counter, version in self._aliases):
            raise RecomputeError(
                f"{self.label}: it returns tensors that share memory with one another or with its arguments (views),"
                " and one of them was changed in place after the call: the gradients of the others would be wrong."
                " Return a copy from the layer (tensor.clone()), change the tensor out of place (x = x + y instead of"
                " x += y), or keep the layer out of the pipeline with RoundPipeStrategy(layers=...)."
            )
        self._aliases = []

    @property
    def saved_inputs(self) -> list[Any]:
        """The arguments' leaves as they are kept for the recompute."""
        return self._saved

    def _check_structure(self, replica: Replica) -> None:
        """A layer that changes its modules or parameters would change the replica's only."""
        if replica.has_changed_structure():
            raise RecomputeError(
                f"{self.label}: the layer adds, removes or replaces modules or parameters of its own in its forward. Do"
                " it before fit, or keep the layer out of the pipeline with RoundPipeStrategy(layers=...)."
            )
        kinds = [(leaf.dtype, leaf.shape) for leaf in self.parameters]
        if kinds != self._parameter_kinds:
            changed = [now != before for now, before in zip(kinds, self._parameter_kinds, strict=True)]
            master = self.layer.parameters[changed.index(True)]
            raise RecomputeError(
                f"{self.label}: the layer changes type or shape of a parameter ({tuple(master.shape)},"
                f" {master.dtype}) in its forward. Do it before fit, or keep the layer out of the pipeline with"
                " RoundPipeStrategy(layers=...)."
            )

    def _save_inputs(self, device: Device, leaves: Sequence[Any], mode: str) -> None:
        if mode != Mode.DROP:
            return
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self._saved.append(leaf)
                continue
            copy = self.is_new or i in self.layer.traits.changed_inputs
            detached = leaf.detach()
            kept = device.keep_input(detached, copy=copy, stays=self.stays)
            self._saved.append(kept)
            if not leaf.is_inference() and (self.is_new or not copy):
                counter = detached if device.is_host else version_of(detached)
                self._versions.append((i, counter, leaf._version))

    def _at_hand(self, device: Device, leaves: Sequence[Any]) -> Sequence[Any]:
        """What is elsewhere comes up from where it is kept, unless the device reaches it: from another one it has come
        down already, or it is kept here."""
        if device.is_host or not self._saved:
            return leaves
        place = device.torch_device

        def at_hand(leaf: Any, kept: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device == place:
                return leaf
            return kept if kept.device == place or not device.reaches(leaf.device) else leaf

        return list(map(at_hand, leaves, self._saved))

    def _check_inputs_after_run(self) -> None:
        for i, tensor, version in self._versions:
            if tensor._version != version:
                self._found_input_change(i, "the layer changes its argument in place")
        if self.is_new:
            self._versions = [entry for entry in self._versions if entry[1]._version == entry[2]]

    def _found_input_change(self, index: int, what: str) -> None:
        self.layer.traits.changed_inputs.add(index)
        if not self.is_new:
            raise RecomputeError(
                f"{self.label}: {what}, which it did not do in the first batch, so there was no copy for the"
                " recompute. The next fit takes one if the first batch shows it; or keep the layer out of the pipeline"
                " with RoundPipeStrategy(layers=...)."
            )

    def _found_state_write(self, mode: str) -> None:
        self.layer.traits.writes_state = True
        if mode == Mode.DROP and self._buffers is None:
            raise RecomputeError(
                f"{self.label}: buffers or attributes of the layer are written, which they were not in the first batch,"
                " so there is no copy for the recompute. Let them be written from the first batch on, or keep the layer"
                " out of the pipeline with RoundPipeStrategy(layers=...)."
            )

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        device: Device,
        gradients: Sequence[Tensor | None],
        *,
        parameters: bool,
        defers: bool = False,
        sums: DeviceSums | None = None,
    ) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
        """Runs the layer again, if its graph was not kept, and its backward.

        Args:
            device: Where to run.
            gradients: One per differentiable output.
            parameters: Whether gradients of the parameters are wanted.
            defers: Whether those of weights may be left to :meth:`weight_gradients`.
            sums: Takes gradients of parameters as they are found.

        Returns:
            The gradients of the inputs that require one, where those are, and (parameter, gradient) for the parameters.
            The parameters are the layer's masters, their gradients on the device.

        Raises:
            RecomputeError: When the layer did not return the same again.
        """
        if self.done:
            raise RuntimeError(
                f"{self.label}: its backward runs a second time, as with retain_graph=True. That is not supported"
                " through layers of the pipeline: add up the losses instead, or keep the layer out of it with"
                " RoundPipeStrategy(layers=...)."
            )
        if all(gradient is None for gradient in gradients):
            return [None] * len(self.gradient_inputs), []
        self.done = True
        compiled = self.compiled is not None or self.layer.traits.compiles
        if defers and parameters and self.kept is None and not compiled:
            self.deferred = DeferredWeights()
        try:
            graph = self.kept if self.kept is not None else self._run_again(device)
            if self._lent is not None:
                self._bring_back(self._lent, device)
            self.kept = self._lent = None
            with asking_for("gradients"):
                return self._differentiate(graph, device, gradients, parameters, sums)
        finally:
            if self._missing is not None:
                self._missing.clear()
            if self._replica is not None:
                self.layer.give_back(self._replica)
                self._replica = None

    def retire(self) -> None:
        """After the microbatch: a tensor that the step has left somewhere may lead here for ever, and is not to hold
        anything by it."""
        if self._replica is not None:  # its graph was kept, and was not needed
            self.layer.give_back(self._replica)
            self._replica = None
        self.kept = self._incomplete = self._missing = self.deferred = self._lent = None
        self._let_go()
        self.arguments.leaves, self.parameters, self.deferred_gradients = [], (), []
        self.arguments.forget()
        self.state = _NO_STATE
        self._versions, self._aliases, self.reached = [], [], []

    def weight_gradients(self, device: Device) -> list[tuple[Tensor, Tensor]]:
        """The gradients of the parameters that :meth:`backward` has left for later, in host memory, or on their way
        there."""
        deferred, self.deferred = self.deferred, None
        if deferred is None:
            return []
        masters = {id(leaf): master for master, leaf in zip(self.layer.parameters, deferred.parameters, strict=True)}
        return [(masters[id(leaf)], device.bring_down(gradient)) for leaf, gradient in deferred.gradients()]

    def _differentiate(
        self,
        graph: Graph,
        device: Device,
        gradients: Sequence[Tensor | None],
        parameters: bool,
        sums: DeviceSums | None,
    ) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
        outputs: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for output, gradient in zip(graph.outputs, gradients, strict=True):
            if gradient is None:
                continue
            if isinstance(output, GradientEdge):
                outputs.append(output)
                seeds.append(gradient)
            elif output.requires_grad:
                outputs.append(output)
                seeds.append(device.send(gradient, device.torch_device))
        targets: list[Any] = list(graph.inputs)
        own: list[tuple[Tensor, Tensor]] = []
        masters: list[Tensor] = []
        if parameters:
            pairs = zip(self.layer.parameters, graph.parameters, strict=True)
            own = [(master, leaf) for master, leaf in pairs if leaf.requires_grad]
            foreign = [parameter for parameter in self.layer.traits.foreign if parameter.requires_grad]
            masters = [*(master for master, _ in own), *foreign]
            targets += [*(leaf for _, leaf in own), *foreign]
        if not outputs or not targets:
            return [None] * len(graph.inputs), []
        listening = _NOTHING if sums is None else sums.listening(own)  # others' parameters are in host memory
        with device.running(), listening:
            device.begin_gradients()
            try:
                if self.deferred is not None:
                    found = self.deferred.differentiate(outputs, targets, seeds)
                else:
                    found = _engine_run_backward(
                        tuple(outputs), tuple(seeds), False, False, tuple(targets), True, accumulate_grad=False
                    )
            except RuntimeError as error:
                if "use_reentrant" in str(error):
                    raise RecomputeError(
                        f"{self.label}: the layer uses torch.utils.checkpoint with use_reentrant=True, which knows no"
                        " gradients of chosen tensors. Set use_reentrant=False, or leave the checkpoint out: the"
                        " pipeline recomputes the layer anyway."
                    ) from error
                if "modified by an inplace operation" in str(error):
                    error.add_note(
                        f"{self.label}: an argument or output of this call, or a tensor inside the layer, is needed for"
                        " its gradient and was changed in place afterwards, by the layer or by the code after it."
                        " Change it out of place (x = x + y instead of x += y), or hand on a copy (tensor.clone())."
                    )
                raise
            inputs = [
                gradient if gradient is None else device.send(gradient, place)
                for gradient, place in zip(found[: len(graph.inputs)], self.input_devices, strict=True)
            ]
            of_masters = found[len(graph.inputs) : len(graph.inputs) + len(masters)]
            return inputs, [(m, g) for m, g in zip(masters, of_masters, strict=True) if g is not None]

    def _bring_back(self, lent: LentParameters, device: Device) -> None:
        """Lets the kept graph have its parameters for the backward."""
        if lent.place != device.torch_device:
            raise RuntimeError(
                f"{self.label}: its graph is on {lent.place}, and its backward has come to {device.name}, for the"
                " backward of this step takes layers in another order than the reverse of the forward's. Use"
                " RoundPipeStrategy(recompute='layer')."
            )
        with device.running(), asking_for("parameters"):
            lent.come_back(device.upload(self.parameters))

    def _run_again(self, device: Device) -> Graph:
        layer = self.layer
        if self.deferred is not None:  # needs operations of another kind in the graph
            self._missing = self._incomplete = None
        elif self._incomplete is not None and not self._missing:
            return self._incomplete  # for addition, or an average, the gradient is enough
        for i, tensor, version in self._versions:
            if tensor._version != version:
                self._found_input_change(i, "an argument was changed in place after the call")
        self._versions = []  # which hold the arguments
        buffers = self._buffers
        unchanged = not self.has_state or layer.state_versions(self.state, self._norms_aside) == self._state_versions
        if buffers is None:
            buffers = [dict(items) for items in layer.buffers()]
            self._copies = self.state.container_copies()
            if not unchanged:
                self._found_state_write(Mode.DROP)
        elif self.is_new and not unchanged:
            layer.traits.writes_state = True
        if self._half is not None:
            self._note_half(self._half if self._half and self._same_in_half(device, buffers) else {})
        if self._incomplete is not None:
            if not self._fill_in(device, buffers):
                return self._run_again(device)
            graph, self._incomplete = self._incomplete, None
            self._let_go()
            return graph
        self._replica = layer.borrow()
        run = self._repeat(device, buffers)
        self._let_go()
        if len(run.leaves) != self.leaf_count:
            raise RecomputeError(self._mismatch(f"{len(run.leaves)} values came out instead of {self.leaf_count}"))
        if self.fingerprints is not None:
            again = [Fingerprint.of(leaf) for leaf in run.leaves if isinstance(leaf, Tensor)]
            if len(again) != len(self.fingerprints) or not all(map(Fingerprint.matches, self.fingerprints, again)):
                raise RecomputeError(self._mismatch("the values differ"))
        return Graph([run.leaves[i] for i in self.differentiable], run.edges, run.parameters)

    def _repeat(self, device: Device, buffers: list[dict[str, Tensor | None]]) -> Run:
        """The second run; the caller's context variables may have other values by now."""
        assert self._replica is not None
        return self.context.run(
            partial(self._execute, self._replica, device, self._saved, buffers, Mode.KEEP, first=False)
        )

    def _let_go(self) -> None:
        """Of what the second run began with."""
        self._saved = []
        self._buffers = None
        self._copies = {}

    def _fill_in(self, device: Device, buffers: list[dict[str, Tensor | None]]) -> bool:
        """Runs the layer again as far as the first run's graph needs it. Returns whether that has what it needs; if
        not, the second run went another way, and is to be made as a whole.

        Raises:
            RecomputeError: When the second run went another way and has changed what it began with.
        """
        missing, traits = self._missing, self.layer.traits
        assert missing is not None
        versions = [leaf._version for leaf in self._saved if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._replica = self.layer.borrow()
        try:
            self._repeat(device, buffers)
        except (Complete, Exception):  # a script, or the layer itself, may have made another one of it
            if not missing.ended:
                raise
        missing.check()
        if missing.difference is None:
            return True
        traits.repeats_whole = True
        after = [leaf._version for leaf in self._saved if isinstance(leaf, Tensor) and not leaf.is_inference()]
        if self._buffers is not None or versions != after:
            raise RecomputeError(self._mismatch(missing.difference))
        self.layer.give_back(self._replica)
        self._missing = self._incomplete = self._replica = None
        return False

    def _same_in_half(self, device: Device, buffers: list[dict[str, Tensor | None]]) -> bool:
        """Warm-up: whether the layer gives the very same bits with those parameters in half precision."""
        assert self._half is not None and self.fingerprints is not None
        full = self.parameters
        leaves = [device.keep_input(leaf, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in self._saved]
        scratch = [{key: None if b is None else b.clone() for key, b in items.items()} for items in buffers]
        copies = self._copies
        replica = self.layer.borrow()
        try:
            made: dict[int, Any] = {}
            self._copies = {at: copy_of(c, made) for at, c in copies.items()}
            self.parameters = [
                nn.Parameter(p.detach().to(self._half[i]), requires_grad=p.requires_grad) if i in self._half else p
                for i, p in enumerate(full)
            ]
            run = self.context.run(partial(self._execute, replica, device, leaves, scratch, Mode.DROP, first=False))
        finally:
            self.parameters, self._copies = full, copies
            self.layer.give_back(replica)
        found = [Fingerprint.of(leaf) for leaf in run.leaves if isinstance(leaf, Tensor)]
        return [f.bits for f in found] == [f.bits for f in self.fingerprints]

    def _note_half(self, half: dict[int, torch.dtype]) -> None:
        """What every call of the layer allows may travel in half precision."""
        traits = self.layer.traits
        before = half if traits.half is None else traits.half
        traits.half = {i: dtype for i, dtype in before.items() if half.get(i) == dtype}

    def _mismatch(self, what: str) -> str:
        return (
            f"{self.label}: run again for the backward pass with the same arguments, the layer did not return the same:"
            f" {what}. Gradients would be wrong. It depends on something besides its arguments, parameters and random"
            " numbers, such as a counter, a cache or a global. Make the layer depend on its arguments only, or keep it"
            " out of the pipeline with RoundPipeStrategy(layers=...)."
        )

    def check_nothing_escaped(self) -> None:
        """After the whole backward: parameters get their gradients from :meth:`backward` alone."""
        if any(leaf.grad is not None for leaf in self.parameters):
            raise RecomputeError(escape_text(self.label))

    def _find_foreign_parameters(self, run: Run, leaves: Sequence[Tensor], calls: Sequence[Any]) -> None:
        """Parameters of others that the layer reaches by itself show in its graph."""
        known = {id(leaf) for leaf in run.parameters}
        if calls or any(getattr(leaf, "is_stand_in", False) for leaf in leaves):
            raise RecomputeError(
                f"{self.label}: the layer uses a tensor made outside it that is none of its arguments, so that tensor's"
                " gradient would be lost. Pass it as an argument, or keep the layer out of the pipeline with"
                " RoundPipeStrategy(layers=...)."
            )
        self.reached = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]

    # -- both ------------------------------------------------------------------------------------------------------

    def _execute(
        self,
        replica: Replica,
        device: Device,
        leaves: Sequence[Any],
        buffers: list[dict[str, Tensor | None]],
        mode: str,
        *,
        first: bool,
    ) -> Run:
        edges: list[GradientEdge] = []
        versions: list[tuple[int, int]] = []
        grad = _NOTHING if mode == Mode.PLAIN else torch.enable_grad()
        deferring = _NOTHING if first else self.deferred or _NOTHING
        with device.running(), self.autocast.again(), grad, self._saving(mode, first=first), deferring:
            inputs = [device.to_device(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            if mode != Mode.PLAIN:
                # Nothing that the layer does to its arguments may touch the caller's autograd graph.
                entered: dict[int, Tensor] = {}
                if numbers := self.gradient_inputs:
                    tensors = enter_call(self.label, [inputs[i] for i in numbers], LEAF)
                    edges = edges_of(tensors, lasting=mode in (Mode.KEEP, Mode.LEND) or self._missing is not None)
                    entered = dict(zip(numbers, tensors, strict=True))
                inputs = [
                    entered[i] if i in entered else leaf.detach() if isinstance(leaf, Tensor) else leaf
                    for i, leaf in enumerate(inputs)
                ]
            if mode != Mode.PLAIN or not device.is_host:
                versions = [
                    (i, leaf._version)
                    for i, leaf in enumerate(inputs)
                    if isinstance(leaf, Tensor) and not leaf.is_inference()
                ]
            if not first:
                self._put_random_state(device)
            given, built = self.arguments.build(inputs)
            end = len(given) - len(self.state.inputs)
            start = end - len(self.names)
            args, named, attributes = given[:start], given[start:end], given[end:]
            copies = {} if first else self._copies
            there = OnDevice(device, self.parameters, buffers, self.state, copies, self._lent)
            if not device.is_host:
                refuse_escapes(there.parameters, self.label)
            if not first and self.deferred is not None:
                self.deferred.parameters = there.parameters
            if self._watch is not None:
                self._watch.begin(there.parameters)
            replica.load(
                self.state,
                attributes,
                there.parameters,
                there.buffers,
                merge_norm_statistics=self.merge_norm_statistics,
                copies=there.copies,
                code=self.compiled,
                holding=self.state.holding if self.is_new else self.layer.traits.gradient_attributes,
            )
            _thread.runs_again, _thread.in_layer = not first, True
            try:
                output = replica.forward(*args, **dict(zip(self.names, named, strict=True)))
            finally:
                _thread.runs_again = _thread.in_layer = False
            if first:
                there.write_back()
                if mode == Mode.PLAIN:  # else they are outputs
                    for i, version in versions:
                        if inputs[i] is not leaves[i] and inputs[i]._version != version:
                            leaves[i].copy_(inputs[i])
                    versions = []
            hook_calls = [(c.module, c.args, c.kwargs, c.output, c.moment) for c in replica.hook_calls]
            changed = [i for i, version in versions if inputs[i]._version != version]
            if len(changed) > 1 and share_memory(inputs[i] for i in changed):
                raise RecomputeError(
                    f"{self.label}: the layer changes an argument in place that shares memory with another one (a view"
                    " of it): the other's gradient would be wrong. Pass a copy (tensor.clone()), or keep the layer out"
                    " of the pipeline with RoundPipeStrategy(layers=...)."
                )
            changed_inputs = [inputs[i] for i in changed]
            held = replica.held_gradients()
            others = (hook_calls, replica.attribute_changes(), built.changes(), changed_inputs, held)
            escaped = (output, *others) if any(others) else (output,)
            structure = Structure(escaped, built.originals())
            is_plain = not any(others) and replica.is_untouched
            return Run(structure, built, edges, replica, inputs, changed, held, there.parameters, is_plain)

    def _saving(self, mode: str, *, first: bool) -> AbstractContextManager[Any]:
        """What autograd's graph of the call saves."""
        if mode == Mode.DROP:
            return saving_nothing(self.label) if self._missing is None else self._missing.leaving_out()
        if self._incomplete is not None and not first:
            assert self._missing is not None
            return self._missing.filling_in()
        if self._lent is not None:
            return self._lent.saving()
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # The caller's hooks (a checkpoint around the layer) are for the caller's own graph.
            return saving_all()
        return _NOTHING

    def _put_random_state(self, device: Device) -> None:
        """As it was in the first run."""
        if self.seed is not None:
            seed_all(self.seed)
            device.seed(self.seed)
        elif self.random_state is not None:
            self.random_state.restore()
            device.set_random_state(self.device_random_state)


_NOTHING = nullcontext()
_NO_STATE = AttributeState([], [], [], [], [], [])


def _put_in_history(tensor: Tensor, changed: Tensor) -> None:
    """Makes what a layer has done to the caller's tensor in place part of that tensor's history."""
    in_place = memory_of(tensor) == memory_of(changed)  # the values are there already, so nothing changes by this copy
    with _unsafe_preserve_version_counter(tensor) if in_place else nullcontext():
        tensor.copy_(changed)
