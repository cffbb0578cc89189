"""What microbatches set on the user's modules: each finds its own again, although they take turns.

Outside of the pipeline, microbatches would run one after the other. A microbatch that sets an attribute and reads it
after a layer call must not find what another has set in between; one that adds to a sum must go on from what is there.
So a microbatch that takes the baton sees what it has set itself, or else what those before it have set.

That is the order of a plain loop, but for what one microbatch reads at a point of the step that comes before the point
where the one before it writes. The first batch shows whether there is such state. Where only later batches differ, a
microbatch that changes a value after a later one has changed or read it is an error.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.looking import MISSING, Changes, Looks
from lightning_roundpipe.pipeline.replica import Layer, same_items
from lightning_roundpipe.pipeline.watching import (
    Key,
    can_be_watched,
    is_iterator,
    is_watched,
    named_by_code,
    set_elsewhere,
    watching,
)

_BEGINNING = 1  # the stretch of code before the first layer
_SOMEWHERE = (-1, 0)
"""Places of a change that has not been seen where it was made: it may have been made at several."""


@dataclass(slots=True)
class Use:
    """What the first batch showed of an attribute. A place is the number of a stretch of code within the step."""

    read: set[int] = field(default_factory=set)
    """Where it was read by a microbatch that had not set it itself."""
    written: set[int] = field(default_factory=set)
    """Where it was set or changed in place, by another microbatch than the first."""
    set_by_layers: bool = False
    read_by_layers: bool = False
    """Whether it was read by a layer that it is no part of."""
    restored: bool = True
    """Whether each step that set it has left it as it was."""
    changed_in_place: bool = False

    def goes_on(self, watched: bool) -> bool:
        """Whether a microbatch depends on what the one before it left, at another place than where it is written."""
        if not self.written:
            return False
        if self.read_by_layers:
            return True
        if self.restored and not self.changed_in_place:
            return False  # each microbatch has one for itself
        if not watched:
            return self.set_by_layers or len(self.written) > 1
        return bool(self.read) and (self.set_by_layers or len(self.read | self.written) > 1)

    def needs_order(self, watched: bool) -> bool:
        """Whether the microbatches must come to the places where it is used in their order. They begin in it."""
        if not self.written or (self.restored and not self.changed_in_place):
            return False
        return (bool(self.read) or not watched) and not (self.read | self.written) <= {_BEGINNING}


@dataclass(frozen=True, slots=True)
class _Found:
    """What a module had when a microbatch took the baton."""

    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    tensors: list[tuple[Key, Tensor]]
    """Which the code may change in place."""


class ModuleAttributes:
    """Swaps attributes along with the baton.

    Args:
        root: The user's module.
        layers: Its layers.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
        keep_order: Called with the reason where they need at least come to each layer in their order.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[Layer],
        run_serially: Callable[[str], None],
        keep_order: Callable[[str], None],
    ) -> None:
        # By id, for a metric's hash follows its state.
        self._modules = {id(module): module for module in root.modules()}
        self._names = {id(module): name or type(module).__name__ for name, module in root.named_modules()}
        inside = {id(module) for layer in layers for module in layer.modules}
        self._outside = {number: module for number, module in self._modules.items() if number not in inside}
        self._restless: dict[int, nn.Module] = {}
        """Modules whose attributes the code between layers sets, as batches have shown; also such within layers."""
        self._quiet: dict[int, _Found] = {}
        """All others between layers: they tell when an attribute is set, and need no look before. And what they had
        when the batch began."""
        self._quiet_tensors: list[tuple[Key, Tensor]] = []
        self._looked_at = dict(self._outside)
        """After the first batch: the modules that are looked at at every hand-over."""
        self._private: dict[Key, bool] = {}
        self._uses: dict[Key, Use] = {}
        self._made_anew: set[Key] = set()
        """Attributes that each step of the first batch set before it read them, so that nothing goes on from them."""
        self._found_last: dict[int, _Found] = {}
        self._watched = {id(module): module for module in can_be_watched(root)}
        self._unwatched: list[int] = []
        """Those that cannot be. The first batch looks at them at every hand-over."""
        self._looks: Looks | None = None
        """In a batch that records."""
        self._changing: dict[int, set[str]] = {}
        """Attributes that steps have changed so far, of modules between layers."""
        self._changed_inside: set[Key] = set()
        """Those that the first batch has changed in place. Of a list, object or iterator, any use may be a change."""
        self._named_by_code = named_by_code(self._modules.values())
        self._run_serially = run_serially
        self._keep_order = keep_order

    def begin_batch(self, batch: Batch) -> None:
        batch.private_before = {
            (module, name): self._modules[module].__dict__.get(name, MISSING)
            for (module, name), private in self._private.items()
            if private
        }

    @contextmanager
    def watching(self, *, records: bool) -> Iterator[None]:
        """Lets the modules tell what is read on them: all in a batch that records, later what the step may change."""
        if records:
            with watching(self._watched.values()):
                self._watched = {number: module for number, module in self._watched.items() if is_watched(module)}
                self._unwatched = [number for number in self._modules if number not in self._watched]
                self._looks = Looks(self._modules, self._outside, self._named_by_code)
                yield
            self._looks = None
            self._choose()
            return
        names = {number: frozenset(self._changing.get(number, ())) for number in self._watched}
        quiet = self._outside.keys() & self._watched.keys() - self._restless.keys()
        self._quiet = {number: self._found(number, self._modules[number]) for number in quiet}
        self._quiet_tensors = [entry for found in self._quiet.values() for entry in found.tensors]
        self._choose()
        set_elsewhere.clear()
        try:
            with watching(self._watched.values(), names):
                yield
            self._check_quiet()
        finally:
            self._quiet, self._quiet_tensors = {}, []
            self._choose()

    def _choose(self) -> None:
        """Chooses what is looked at at every hand-over."""
        found = {**self._outside, **self._restless}
        self._looked_at = {number: module for number, module in found.items() if number not in self._quiet}

    def _is_restless(self, number: int) -> None:
        """From now on, the module is looked at."""
        self._restless[number] = self._looked_at[number] = self._modules[number]
        self._quiet.pop(number, None)

    def _check_quiet(self) -> None:
        """
        Raises:
            RuntimeError: When attributes were changed past the modules, so that it is not known by which microbatch.
        """
        for number, found in self._quiet.items():
            now = self._modules[number].__dict__
            if number not in self._outside or same_items(now, found.attributes):
                continue
            if number not in set_elsewhere:
                before = found.attributes
                changed = (n for n in {**before, **now} if now.get(n, MISSING) is not before.get(n, MISSING))
                name = next(changed)
                raise RuntimeError(
                    f"{self._name((number, name))} changes in the step by way of the module's __dict__, which it did"
                    " not in the first batch, so microbatches may have found one another's value there. Set it as an"
                    " attribute, or train with RoundPipeStrategy(microbatches=1)."
                )
            self._restless[number] = self._modules[number]  # by the main thread, say, or a hook in the backward

    def put(self, microbatch: Microbatch) -> None:
        """The microbatch takes the baton."""
        batch = microbatch.batch
        microbatch.stretch += 1
        begins, microbatch.first_take = microbatch.first_take, False
        if begins:
            if batch.records:
                microbatch.before = {number: dict(module.__dict__) for number, module in self._modules.items()}
            elif not batch.serial:
                microbatch.attributes.update(batch.private_before)
        if begins or not batch.serial:  # where none comes in between, it finds what it has left
            self._put_back(microbatch)
        microbatch.accesses.touched.clear()
        microbatch.accesses.just_written.clear()
        if batch.records:
            self._look_from(microbatch, begins=begins)
        else:
            self._look_at_what_changes(microbatch)
        microbatch.accesses.read.clear()
        microbatch.accesses.read_by_layer.clear()

    def note(self, microbatch: Microbatch) -> None:
        """The microbatch gives the baton up."""
        if microbatch.looks is not None:
            self._note_in_first_batch(microbatch, microbatch.looks)
            return
        changed: list[Key] = []
        for number in microbatch.accesses.touched & self._quiet.keys():
            found = self._quiet[number]
            microbatch.seen[number] = self._modules[number], found.attributes
            if number in self._outside:
                microbatch.buffers[number] = found.buffers
            else:
                self._is_restless(number)
        for number, (module, before) in microbatch.seen.items():
            now = module.__dict__
            if same_items(now, before):
                continue
            self._is_restless(number)
            for name in {**before, **now}:
                if now.get(name, MISSING) is not before.get(name, MISSING):
                    self._note_change(microbatch, (number, name), before.get(name, MISSING), microbatch.stretch)
                    if number in self._outside and _goes_on(before.get(name, MISSING), now.get(name, MISSING)):
                        changed.append((number, name))
        for number, name in microbatch.accesses.just_written:
            now = self._modules[number].__dict__ if number in self._modules else {}
            if (number, name) not in microbatch.attributes and name in now:  # set to the very object that was there
                self._note_change(microbatch, (number, name), now[name], microbatch.stretch)
        rebound = self._rebound_buffers(microbatch)
        in_place = [key for key, tensor, version in microbatch.versions if tensor._version != version] + rebound
        changed += in_place
        microbatch.seen = {}
        microbatch.buffers = {}
        microbatch.versions = []
        self._check_order(microbatch, changed)
        for key in in_place:
            self._check_reads(microbatch, key)
            microbatch.batch.last_in_place[key] = microbatch.index
        self._note_reads(microbatch)

    def _put_back(self, microbatch: Microbatch) -> None:
        """What it has set itself, or else what those before it have."""
        for (module, name), value in microbatch.attributes.items():
            _put(self._modules[module], name, value)
        for (module, name), before in microbatch.batch.changed.items():
            if (module, name) not in microbatch.attributes:
                _put(self._modules[module], name, _left_before(microbatch, (module, name), before))

    def _look_at_what_changes(self, microbatch: Microbatch) -> None:
        found = {number: (module, self._found(number, module)) for number, module in self._looked_at.items()}
        microbatch.seen = {number: (module, each.attributes) for number, (module, each) in found.items()}
        microbatch.buffers = {number: each.buffers for number, (_, each) in found.items() if number in self._outside}
        if not microbatch.batch.serial:
            microbatch.versions = [
                (key, tensor, tensor._version)
                for number, (_, each) in found.items()
                if number in self._outside
                for key, tensor in each.tensors
            ]
            microbatch.versions += [(key, tensor, tensor._version) for key, tensor in self._quiet_tensors]
        microbatch.accesses.before_touch = self._look_before_writes

    def _look_before_writes(self, number: int) -> None:
        """What a module within a layer has before the code between layers sets something on it."""
        if number in self._modules and number not in self._quiet and number not in self._looked_at:
            self._quiet[number] = self._found(number, self._modules[number])

    # -- the first batch -------------------------------------------------------------------------------------------

    def _look_from(self, microbatch: Microbatch, *, begins: bool) -> None:
        """From now on, modules are looked at before their first access."""
        accesses = microbatch.accesses
        if begins:
            assert self._looks is not None
            microbatch.looks = self._looks
            microbatch.looks.begin()
            accesses.before_touch = partial(self._look_first, microbatch)
        for module in microbatch.calls[-1].layer.modules if microbatch.calls else ():
            accesses.touch(id(module))  # by the layer that runs, or by what takes its outputs to where they belong

    @torch.compiler.disable  # the access may be one of a compiled function, into which dynamo looks
    def _look_first(self, microbatch: Microbatch, number: int) -> None:
        """Before a module's first access in a stretch of code: what has changed on it was changed by another way."""
        if microbatch.looks is not None and number in self._modules:
            self._note_changes(microbatch, microbatch.looks.look([number]), _SOMEWHERE)

    def _note_in_first_batch(self, microbatch: Microbatch, looks: Looks) -> None:
        accesses = microbatch.accesses
        changes = looks.look({*self._unwatched, *(number for number in accesses.touched if number in self._modules)})
        for number, name in accesses.read:
            if number in self._modules and is_iterator(self._modules[number].__dict__.get(name)):
                changes.in_place[number, name] = None
        self._note_changes(microbatch, changes, (microbatch.stretch,))
        for key in accesses.read:
            self._use(key).read.add(microbatch.stretch)
        for key in accesses.read_by_layer:
            self._use(key).read_by_layers = True
        looks.hand_out(accesses.read)

    def _note_changes(self, microbatch: Microbatch, changes: Changes, places: Iterable[int]) -> None:
        for key in changes.attributes.keys() - microbatch.accesses.written:
            if key[0] in self._watched:  # by way of its `__dict__`, where reads are not noted, either
                self._use(key).read.update(_SOMEWHERE)
        for place in places:
            for (number, name), before in changes.attributes.items():
                self._note_change(microbatch, (number, name), before, place)
                self._is_restless(number)
            for key in changes.in_place:
                self._note_change_in_place(microbatch, key, place)

    def set(self, microbatch: Microbatch, module: nn.Module, name: str, value: Any, found: dict[str, Any]) -> None:
        """Sets what a layer has set in its forward, which began with the attributes found.

        Raises:
            RuntimeError: When the layer went on from a value that an earlier microbatch has changed meanwhile, or later
                ones have.
        """
        key = id(module), name
        before = module.__dict__.get(name, MISSING)
        module.__dict__[name] = value
        if microbatch.batch.microbatches > 1:
            self._note_change(microbatch, key, before, microbatch.stretch - 1)  # where the layer ran
            if id(module) in microbatch.seen:  # the code between layers has not done it
                _, seen = microbatch.seen[id(module)]
                microbatch.seen[id(module)] = module, {**seen, name: value}
            if microbatch.looks is not None:
                microbatch.looks.set(id(module), name, value)
            if microbatch.batch.records:
                self._use(key).set_by_layers = True
            began = found.get(name, MISSING)
            exempt = key in self._made_anew or self._private.get(key) or microbatch.batch.serial
            if not exempt and _goes_on(began, value) and not _same_value(began, before):
                raise self._out_of_order(key)
            if _goes_on(before, value):
                self._check_order(microbatch, [key])

    def end_step(self, microbatch: Microbatch) -> None:
        """First batch: finds attributes that a step sets and in the end leaves as they were, such as ``training`` or a
        counter of calls. Each microbatch gets its own from the start. And what has changed without any look at it."""
        assert microbatch.looks is not None
        self._note_changes(microbatch, microbatch.looks.look(self._modules), _SOMEWHERE)
        microbatch.looks = microbatch.accesses.before_touch = None
        for number, name in microbatch.attributes:
            now = self._modules[number].__dict__.get(name, MISSING)
            restored = _same_value(microbatch.before[number].get(name, MISSING), now)
            self._private[number, name] = restored and self._private.get((number, name), True)
            self._use((number, name)).restored &= restored
        microbatch.before = {}

    def end_batch(self, batch: Batch) -> None:
        """Leaves attributes as if the microbatches had run one after the other."""
        self.forget()
        for microbatch in batch.runs:
            for (module, name), value in microbatch.attributes.items() if microbatch is not None else ():
                _put(self._modules[module], name, value)
        for microbatch in batch.runs:
            if microbatch is not None:
                microbatch.attributes = {}
        if batch.records:
            for key, use in self._uses.items():
                if use.goes_on(key[0] in self._watched):
                    self._run_serially(f"microbatches go on from what others leave in {self._name(key)}")
                elif use.needs_order(key[0] in self._watched):
                    self._keep_order(f"microbatches go on from what those before them leave in {self._name(key)}")
                if key[0] in self._watched and not use.read and not use.read_by_layers:
                    self._made_anew.add(key)
            self._uses = {}

    def forget(self) -> None:
        """Lets go of what modules had."""
        self._found_last.clear()

    def _use(self, key: Key) -> Use:
        return self._uses.setdefault(key, Use())

    def _note_change(self, microbatch: Microbatch, key: Key, before: Any, place: int) -> None:
        module, name = key
        microbatch.batch.changed.setdefault(key, before)
        microbatch.accesses.written.add(key)
        if not _same_value(before, self._modules[module].__dict__.get(name, MISSING)):
            self._check_reads(microbatch, key)
        microbatch.attributes[key] = self._modules[module].__dict__.get(name, MISSING)
        if microbatch.batch.records and microbatch.index > 0:
            self._use(key).written.add(place)

    def _note_change_in_place(self, microbatch: Microbatch, key: Key, place: int) -> None:
        self._check_reads(microbatch, key)
        self._changed_inside.add(key)
        use = self._use(key)
        use.changed_in_place = True
        use.read.add(place)
        if microbatch.index > 0:
            use.written.add(place)

    def _rebound_buffers(self, microbatch: Microbatch) -> list[Key]:
        """Buffers that are other tensors now. Unlike attributes, microbatches share them: as if changed in place."""
        found: list[Key] = []
        for number, before in microbatch.buffers.items():
            now = dict(self._modules[number]._buffers.items())
            if not same_items(now, before):
                found += [
                    (number, name)
                    for name in {**before, **now}
                    if now.get(name, MISSING) is not before.get(name, MISSING)
                ]
        return found

    def _note_reads(self, microbatch: Microbatch) -> None:
        """
        Raises:
            RuntimeError: When a later microbatch has changed what was read.
        """
        batch = microbatch.batch
        for key in microbatch.accesses.read if not batch.serial else ():
            if batch.last_in_place.get(key, 0) > microbatch.index:
                raise self._out_of_order(key)
            if key in self._changed_inside:
                self._check_reads(microbatch, key)
            batch.last_to_read[key] = max(batch.last_to_read.get(key, 0), microbatch.index)

    def _check_reads(self, microbatch: Microbatch, key: Key) -> None:
        """At a change of an attribute; from the next batch on, its reads are noted.

        Raises:
            RuntimeError: When a later microbatch has read it before, which should have found this one's value.
        """
        number, name = key
        if number in self._outside and number in self._watched:
            self._changing.setdefault(number, set()).add(name)
        if microbatch.batch.last_to_read.get(key, 0) > microbatch.index and not self._private.get(key):
            raise self._out_of_order(key)

    def _check_order(self, microbatch: Microbatch, changed: Iterable[Key]) -> None:
        """
        Raises:
            RuntimeError: When a later microbatch has changed a value before, and so did not go on from this one's.
        """
        batch = microbatch.batch
        for key in changed if not batch.serial else ():
            last = batch.last_to_change.get(key, 0)
            if key in self._made_anew or self._private.get(key):
                continue
            if last > microbatch.index:
                raise self._out_of_order(key)
            batch.last_to_change[key] = microbatch.index

    def _out_of_order(self, key: Key) -> RuntimeError:
        return RuntimeError(
            f"{self._name(key)} changes in the step, and microbatches come to it in another order than one after the"
            " other, which they did not in the first batch. So what they find there would not be what a plain run has."
            " Keep such values out of training_step, set split='model' (it then runs once for the whole batch), or"
            " train with RoundPipeStrategy(microbatches=1)."
        )

    def _found(self, number: int, module: nn.Module) -> "_Found":
        """What a module has now. The same object as long as nothing has changed: the baton goes round all the time."""
        found = self._found_last.get(number)
        buffers = module._buffers
        if found is None or not (same_items(module.__dict__, found.attributes) and same_items(buffers, found.buffers)):
            tensors = [
                ((number, name), tensor)
                for items in (buffers, module.__dict__)
                for name, tensor in items.items()
                if isinstance(tensor, Tensor) and not tensor.is_inference()
            ]
            found = self._found_last[number] = _Found(dict(module.__dict__), dict(buffers.items()), tensors)
        return found

    def _name(self, key: Key) -> str:
        number, name = key
        if number in self._names:
            return f"{self._names[number]}.{name}"
        kind = next(type(value).__name__ for value in self._named_by_code if id(value) == number)
        return f"a {kind} that the code of the modules refers to by a global name or a closure"


def _left_before(microbatch: Microbatch, key: Key, before: Any) -> Any:
    """What the microbatches before this one have left in an attribute."""
    for earlier in reversed(microbatch.batch.runs[: microbatch.index]):
        if earlier is not None and key in earlier.attributes:
            return earlier.attributes[key]
    return before


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _goes_on(before: Any, value: Any) -> bool:
    """Whether a new value may be made of the one before it, as a count or a sum is."""
    if isinstance(value, Tensor):
        return not value.requires_grad and value is not before
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not _same_value(before, value)


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)
