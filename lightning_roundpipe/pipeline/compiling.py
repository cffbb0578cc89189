"""torch.compile: layers that run compiled, and what the user has compiled.

The pipeline runs layers by themselves, with other tensors in place of their parameters. So what the user has compiled
around layers (a container of theirs, the whole module) is taken for the wish to compile each of them: they share one
compiled code per kind, and the code between them runs as it is.
"""

import types
import warnings
from collections.abc import Callable, Mapping
from threading import local
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo import OptimizedModule, external_utils
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import DisableContext, OptimizeContext, innermost_backend
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

_EAGER_THIS_TIME = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
)


class _ThreadState(local):
    prepare: Callable[[], None] | None = None
    """Called before anything is compiled in this thread."""
    unprepared = 0
    """How often something was compiled without that: functions of the user's that a layer calls."""


_thread = _ThreadState()


def before_compiling(prepare: Callable[[], None] | None) -> None:
    """Calls a function in this thread whenever the code of a layer is about to be compiled."""
    _thread.prepare = prepare


def unprepared_compilations() -> int:
    """How many functions this thread has compiled without warning, since :func:`count_compilations`."""
    return _thread.unprepared


def count_compilations() -> None:
    """Lets dynamo tell of everything that it compiles. To be called again after a ``torch._dynamo.reset``."""
    if _count not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_count)


def _count(_: Any) -> None:
    _thread.unprepared += 1


class CompiledKind:
    """The compiled code that layers of one kind share.

    It gets the layer's modules as an argument: neither their tensors nor the layer's place in the model are part of it,
    so one compilation serves all of them. Where compiling fails, that call goes on uncompiled, and so do later ones.

    Args:
        name: Names the kind in the warning.
        settings: How to compile, as :func:`compile_settings` gives it.
    """

    def __init__(self, name: str, settings: Any) -> None:
        self.name = name
        self.settings = settings
        self.failed = False
        # Dynamo keeps what it has compiled with the code object: each kind has its own.
        function = types.FunctionType(_run.__code__.replace(), _run.__globals__, "run_layer")
        self.run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
        self.run = prepared(settings, self._fail)(function)

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            warn_uncompiled(self.name, error)


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


def warn_uncompiled(name: str, error: Exception) -> None:
    reason = " ".join(str(error).strip().split("\n")[:2])
    warnings.warn(
        f"roundpipe: {name} runs uncompiled, because it could not be compiled: {type(error).__name__}: {reason}",
        stacklevel=2,
    )


def prepared(settings: Any, fail: Callable[[Exception], None]) -> Any:
    """The same settings, but what is asked for by :func:`before_compiling` is done first, and errors are no end."""
    if not isinstance(settings, OptimizeContext):
        return settings
    ours = object.__new__(type(settings))
    ours.__dict__.update(settings.__dict__)
    ours.callback = _Compile(settings.callback, fail)
    ours.fullgraph = False  # the callback knows; here it would be an error if nothing was compiled
    return ours


class _Compile:
    """Dynamo's callback for a frame that it has no code for yet."""

    def __init__(self, compile_frame: Any, fail: Callable[[Exception], None]) -> None:
        self._torchdynamo_orig_backend = compile_frame  # by which dynamo knows its own code again
        self._fail = fail

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        if _thread.prepare is not None:
            _thread.prepare()
        before = _thread.unprepared
        try:
            # The backward, too: when it runs, the random generators may be in use elsewhere.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            self._fail(error)
            return _EAGER_THIS_TIME
        finally:
            _thread.unprepared = before


def compile_settings(options: Mapping[str, Any]) -> Any:
    """How to compile, from keyword arguments of ``torch.compile``. Random numbers are those of uncompiled code.

    Raises:
        TypeError: When ``torch.compile`` does not know an argument.
        RuntimeError: When it does not accept a value.
    """
    options = dict(options)
    if options.get("backend", "inductor") == "inductor":
        if (mode := options.pop("mode", None)) is not None:
            options["options"] = {**torch._inductor.list_mode_options(mode), **(options.get("options") or {})}
        options["options"] = {"fallback_random": True, **(options.get("options") or {})}
    compiled: Any = torch.compile(nn.Identity(), **options)
    return compiled.dynamo_ctx


def settings_by_module(root: nn.Module, default: Any | None) -> dict[int, Any]:
    """How each module (by id) is to be compiled: as the user has compiled it, or what is around it; None: not at all.

    Args:
        root: The module.
        default: How to compile what the user has not compiled.
    """
    found: dict[int, Any] = {}

    def visit(module: nn.Module, settings: Any | None) -> None:
        if id(module) in found:
            return
        if isinstance(module, OptimizedModule):
            settings = module.dynamo_ctx
        for name in ("forward", "_compiled_call_impl"):
            if (compiled := compiled_function(module.__dict__.get(name))) is not None:
                settings = compiled[0]
        found[id(module)] = settings if isinstance(settings, OptimizeContext) else None
        for child in module.children():
            visit(child, settings)

    visit(root, default)
    return found


def same_settings(a: Any, b: Any) -> bool:
    """Whether two calls of ``torch.compile`` had the same arguments."""
    return a is b or (
        innermost_backend(a.callback) == innermost_backend(b.callback)
        and a.fullgraph == b.fullgraph
        and a._dynamic == b._dynamic
    )


def compiled_function(value: Any) -> tuple[Any, Any] | None:
    """What ``torch.compile`` or ``torch.compiler.disable`` has made of a function, taken apart.

    Returns:
        Its settings and the function; None for anything else.
    """
    if not isinstance(value, types.FunctionType) or not hasattr(value, "_torchdynamo_orig_callable"):
        return None
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    settings = cells["self"].cell_contents if "self" in cells else None
    if not isinstance(settings, (OptimizeContext, DisableContext)):
        return None
    function = value._torchdynamo_orig_callable
    if _is_outer_frame(function):
        function = function.__wrapped__
    return settings, function


def compile_function(settings: Any, function: Any) -> Any:
    """The reverse of :func:`compiled_function`."""
    if isinstance(function, nn.Module):
        function = external_utils.wrap_inline(function)
    return settings(function)


def _is_outer_frame(function: Any) -> bool:
    """Whether a function is only there because dynamo begins with a frame that is not torch's own."""
    return isinstance(function, types.FunctionType) and function.__code__.co_filename == external_utils.__file__
