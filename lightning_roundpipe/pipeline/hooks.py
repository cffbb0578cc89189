"""The user's forward hooks of modules inside a layer: they run after the call, on its outputs."""

from collections.abc import Mapping
from typing import Any

from lightning_roundpipe.pipeline.replica import AttributeState, Layer
from lightning_roundpipe.pipeline.runs import Escaped
from lightning_roundpipe.pipeline.watching import Key, contents, same
from lightning_roundpipe.trees import tensors


def run_hooks(layer: Layer, escaped: Escaped) -> None:
    """Runs those of a call.

    Raises:
        RuntimeError: When one replaces or changes its module's output, which the rest of the layer has used by now.
    """
    for index, args, kwargs, output, _ in escaped.hook_calls:
        _run(layer, index, args, kwargs, output)


def run_and_check_hooks(layer: Layer, escaped: Escaped, read: Mapping[Key, int]) -> None:
    """The same in the first batch.

    Args:
        layer: The layer.
        escaped: What came out of the call.
        read: When the call has last read an attribute.

    Raises:
        RuntimeError: Also when a hook sets what the call itself has read after the hook's place.
    """
    for index, args, kwargs, output, moment in escaped.hook_calls:
        before = layer.attributes()
        held = before.contents()
        _run(layer, index, args, kwargs, output)
        _check(layer, index, before, held, {at for at, when in read.items() if when > moment})


def _run(layer: Layer, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Runs the hooks of one module."""
    module = layer.modules[index]
    versions = [t._version for t in tensors(output) if not t.is_inference()]
    for number, hook in list(module._forward_hooks.items()):
        if number in module._forward_hooks_with_kwargs:
            result = hook(module, args, kwargs, output)
        else:
            result = hook(module, args, output)
        changed = [t._version for t in tensors(output) if not t.is_inference()] != versions
        if changed or (result is not None and result is not output):
            raise RuntimeError(
                f"layer {layer.name!r}: a forward hook on {type(module).__name__} inside it replaces or changes the"
                " module's output, which is not supported there. Put the hook on the layer itself, or keep the layer"
                " out of the pipeline with RoundPipeStrategy(layers=...)."
            )


def _check(
    layer: Layer,
    index: int,
    before: AttributeState,
    held: dict[tuple[int, str], list[Any]],
    read_later: set[tuple[int, str]],
) -> None:
    """They have run too late for what the layer itself reads after them."""
    for i, (module, items) in enumerate(zip(layer.modules, before.dicts, strict=True)):
        now = module.__dict__
        for name in {**items, **now}:
            changed = name not in items or name not in now or now[name] is not items[name]
            if (i, name) in held and not changed:
                changed = not same(contents(now[name]), held[i, name])
            if changed and (id(module), name) in read_later:
                raise RuntimeError(
                    f"layer {layer.name!r}: a forward hook on {type(layer.modules[index]).__name__} inside it sets"
                    f" {name!r} of {type(module).__name__}, which the layer reads in the same call. Hooks inside a"
                    " layer run after it. Set it in the module's forward instead of a hook, or keep the layer out of"
                    " the pipeline with RoundPipeStrategy(layers=...)."
                )
