"""Which submodules are layers: the smallest things that the pipeline moves and calls as one."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch._dynamo import OptimizedModule

LayerSpec: TypeAlias = Sequence[str | type[nn.Module]] | Callable[[nn.Module], object]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_layers(root: nn.Module, spec: LayerSpec | None = None) -> dict[str, nn.Module]:
    """The layers of a module, by name, in the order of registration. No layer lies within another.

    Without a spec, these are the children of the outermost ``Sequential``, ``ModuleList`` and ``ModuleDict``
    containers, three and more blocks of one class side by side, the blocks that transformers' models name in
    ``_no_split_modules``, and of what remains, the largest modules with parameters. Parameters of modules that hold
    layers are used by the code between the layers.

    Args:
        root: The module to look through; never a layer itself.
        spec: Class names, classes or module paths (``"net.blocks.3"``): modules with parameters that lie outside the
            chosen ones become layers, too, and of containers their children. Or a function that is called with the
            root and returns the layers, or with each submodule in turn and tells whether it is one: what it leaves out
            runs as code between the layers.

    Raises:
        ValueError: When the spec matches no module.
    """
    chosen = _named_blocks(root) if spec is None else _specified(root, spec)
    layers: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def is_open(module: nn.Module, repeated: bool) -> bool:
        if module in chosen or _contains(module, chosen):
            return module not in chosen
        if spec is None:
            return not repeated and _is_open(module)
        return isinstance(module, _CONTAINERS) or not _callable(module)  # the step may call the children themselves

    def visit(name: str, module: nn.Module, repeated: bool) -> None:
        if isinstance(module, OptimizedModule):
            visit(f"{name}._orig_mod", module._orig_mod, repeated)
            return
        if module in seen or not (_callable(module) or _holds_modules(module)):
            return
        if names_of_scripts(module):  # a script cannot be replicated, nor can what holds one
            seen.add(module)
            descend(name, module)
            return
        if not is_open(module, repeated):
            if _callable(module) and (module in chosen or (not callable(spec) and _worth_moving(module))):
                seen.add(module)
                layers[name] = module
            return
        seen.add(module)
        descend(name, module)

    def descend(name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        kinds = Counter(type(uncompiled(child)) for child in module.children())
        in_container = isinstance(module, _CONTAINERS)
        for child_name, child in module.named_children():
            # Blocks of one kind side by side are layers. Two alike outside a container are rather two models (student
            # and teacher), and a container is a block only within a container (a stage of a ResNet).
            enough = 2 if in_container else 3
            own = uncompiled(child)
            repeated = kinds[type(own)] >= enough and (in_container or not isinstance(own, _CONTAINERS))
            visit(f"{name}.{child_name}" if name else child_name, child, repeated)

    descend("", root)
    return layers


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def _callable(module: nn.Module) -> bool:
    """Containers of parameters or modules have no forward of their own."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
        return False
    return type(module).forward is not nn.Module.forward


def _holds_modules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def names_of_scripts(module: nn.Module) -> list[str]:
    """The scripts with tensors of their own in a module. One without may stay where it is, in a replica, too."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.jit.ScriptModule) and _worth_moving(part)
    ]


def _contains(module: nn.Module, chosen: set[nn.Module]) -> bool:
    return any(submodule in chosen for submodule in module.modules())


def _worth_moving(module: nn.Module) -> bool:
    """Modules without any tensor, such as losses and metrics, stay with the code between the layers."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _is_open(module: nn.Module) -> bool:
    """Whether layers are looked for inside: containers and what holds one, and models with several named parts."""
    if isinstance(module, _CONTAINERS):
        return True
    return any(isinstance(submodule, _CONTAINERS) and len(submodule) > 1 for submodule in module.modules()) or (
        _is_dominant_composite(module)
    )


def _is_dominant_composite(module: nn.Module) -> bool:
    """A plain module whose children carry all the parameters in several parts, such as a model with named blocks."""
    parts = [child for child in module.children() if next(child.parameters(), None) is not None]
    own = any(True for _ in module.parameters(recurse=False))
    return len(parts) > 2 and not own and any(_holds_modules(part) for part in parts)


def _named_blocks(root: nn.Module) -> set[nn.Module]:
    names: set[str] = set()
    for module in root.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return _outermost(root, lambda module: type(module).__name__ in names)


def _specified(root: nn.Module, spec: LayerSpec) -> set[nn.Module]:
    if callable(spec):
        answer = spec(root)
        if isinstance(answer, Iterable):
            found = set(map(uncompiled, answer))
            inside = set(root.modules())
            if stray := [type(module).__name__ for module in found if module not in inside]:
                raise ValueError(f"`layers` returned modules that are not part of {type(root).__name__}: {stray}.")
            return _outermost(root, found.__contains__)
        return _outermost(root, lambda module: bool(spec(module)))
    chosen: set[nn.Module] = set()
    modules = dict(root.named_modules())
    for item in spec:
        if isinstance(item, str) and item in modules:
            found = {uncompiled(modules[item])}
        else:
            found = {
                module
                for module in modules.values()
                if (type(module).__name__ == item if isinstance(item, str) else isinstance(module, item))
            }
        if not found:
            raise ValueError(
                f"`layers` names {item!r}, but {type(root).__name__} has no module of that path or class."
                f" Its modules are of the classes {sorted({type(module).__name__ for module in modules.values()})}."
            )
        chosen |= found
    chosen.discard(root)
    return _outermost(root, chosen.__contains__)


def _outermost(root: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> set[nn.Module]:
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if is_chosen(child):
                found.add(child)
            else:
                visit(child)

    visit(root)
    return found
