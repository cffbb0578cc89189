"""What microbatches set on the user's modules: each finds its own again, although they take turns.

Outside of the pipeline, microbatches would run one after the other. A microbatch that sets an attribute and reads it
after a layer call must not find what another has set in between; one that adds to a sum must go on from what is there.
So what a microbatch has set itself is put back when it takes the baton, and nothing else.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.replica import Layer, same_items
from lightning_roundpipe.trees import tensors

_MISSING = object()


class ModuleAttributes:
    """Swaps attributes along with the baton.

    Args:
        root: The user's module.
        layers: Its layers.
        run_serially: Called with the reason where only a serial order of the microbatches can be right.
    """

    def __init__(self, root: nn.Module, layers: Iterable[Layer], run_serially: Callable[[str], None]) -> None:
        # By id, for a metric's hash follows its state.
        self._modules = {id(module): module for module in root.modules()}
        inside = {id(module) for layer in layers for module in layer.modules}
        self._outside = {number: module for number, module in self._modules.items() if number not in inside}
        self._inside: dict[int, nn.Module] = {}
        """Modules within layers whose attributes the code between layers sets, as the first batch has shown."""
        self._private: dict[tuple[int, str], bool] = {}
        self._run_serially = run_serially

    def begin_batch(self, batch: Batch) -> None:
        batch.private_before = {
            (module, name): self._modules[module].__dict__.get(name, _MISSING)
            for (module, name), private in self._private.items()
            if private
        }

    def put(self, microbatch: Microbatch) -> None:
        """The microbatch takes the baton."""
        batch = microbatch.batch
        if microbatch.first_take:
            if batch.records:
                microbatch.before = {number: dict(module.__dict__) for number, module in self._modules.items()}
            elif not batch.serial:
                microbatch.attributes.update(batch.private_before)
            microbatch.first_take = False
        for (module, name), value in microbatch.attributes.items():
            _put(self._modules[module], name, value)
        watched = self._modules.values() if batch.records else (*self._outside.values(), *self._inside.values())
        microbatch.seen = [(module, dict(module.__dict__)) for module in watched]
        if batch.records:
            microbatch.contents = _contents_of_containers(self._outside.values())

    def note(self, microbatch: Microbatch) -> None:
        """The microbatch gives the baton up."""
        for module, before in microbatch.seen:
            now = module.__dict__
            if same_items(now, before):
                continue
            for name in {**before, **now}:
                if now.get(name, _MISSING) is not before.get(name, _MISSING):
                    microbatch.attributes[id(module), name] = now.get(name, _MISSING)
                    microbatch.settings[id(module), name] += 1
                    if id(module) not in self._outside:
                        self._inside[id(module)] = module
        if microbatch.batch.records and _gradients_were_put_in(microbatch.contents):
            self._run_serially("the step puts tensors with gradients into a list or dict of a module's")
        microbatch.seen = []
        microbatch.contents = []

    def end_step(self, microbatch: Microbatch) -> None:
        """First batch: finds attributes that a step sets and in the end leaves as they were, such as ``training`` or a
        counter of calls. Each microbatch gets its own from the start."""
        for (number, name), stretches in microbatch.settings.items():
            now = self._modules[number].__dict__.get(name, _MISSING)
            restored = _same_value(microbatch.before[number].get(name, _MISSING), now)
            self._private[number, name] = restored and self._private.get((number, name), True)
            if stretches > 1 and not restored and number in self._outside and _may_be_a_sum(now):
                kind = type(self._modules[number]).__name__
                self._run_serially(f"the step goes on counting in {kind}.{name} between layers")
        microbatch.before = {}

    def set(self, microbatch: Microbatch, module: nn.Module, name: str, value: Any) -> None:
        """Sets what a layer has set in its forward."""
        module.__dict__[name] = value
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.left_by = microbatch.label  # type: ignore[attr-defined]
        if microbatch.batch.microbatches > 1:
            microbatch.attributes[id(module), name] = value

    def end_batch(self, batch: Batch) -> None:
        """Leaves attributes as if the microbatches had run one after the other."""
        for microbatch in batch.runs:
            for (module, name), value in microbatch.attributes.items() if microbatch is not None else ():
                _put(self._modules[module], name, value)


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _contents_of_containers(modules: Iterable[nn.Module]) -> list[tuple[Any, list[Any]]]:
    return [
        (value, list(value.values() if isinstance(value, dict) else value))
        for module in modules
        for name, value in module.__dict__.items()
        if type(value) in (list, dict, set) and name not in ("_parameters", "_buffers", "_modules")
    ]


def _gradients_were_put_in(contents: list[tuple[Any, list[Any]]]) -> bool:
    for container, before in contents:
        known = {id(item) for item in before}
        for item in container.values() if isinstance(container, dict) else container:
            if id(item) not in known and any(tensor.requires_grad for tensor in tensors(item)):
                return True
    return False


def _may_be_a_sum(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)
