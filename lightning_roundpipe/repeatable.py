"""Runs of the user's step in which a batch and its parts compute the same, if the loss allows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.devices.file_pages import is_on_file
from lightning_roundpipe.microbatch import IGNORED_LABEL
from lightning_roundpipe.pipeline.rng import RandomState, generator_state
from lightning_roundpipe.undoing import undone

_SEED = 7_158_278_826
"""Of generators that the step has not seeded itself: a number that nobody else will choose."""
_WRITING = {"out", "max_norm", "inplace"}
"""Arguments of functions that may write to what they are given."""
_HANDING_OUT = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"}
"""Functions whose result may be written to unseen."""


@contextmanager
def comparable(module: nn.Module, number: float = 0.0) -> Iterator["Repeatable"]:
    """A batch and its parts compute the same in it, if the loss allows: without randomness, and with the running
    statistics of BatchNorm, for that it normalizes per microbatch is known and no coupling of the loss. See also
    :func:`undone`.

    Args:
        module: The user's module.
        number: What a single random number is, that all samples share.
    """
    with undone(module) as generators:
        for generator in (torch.default_generator, *generators):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(_SEED)
        repeatable = Repeatable(generators, number)
        try:
            with repeatable:
                for submodule in module.modules():
                    if isinstance(submodule, _BatchNorm) and submodule.track_running_stats:
                        submodule.training = False
                yield repeatable
        finally:
            repeatable.put_back()


class Repeatable(TorchFunctionMode):
    """No randomness, so that a batch and its parts can be compared; and changes of parameters that can be put back.

    A sample's random numbers are its own: the same ones in the whole batch and in a part of it. Not so those of a
    generator that the step makes or seeds by itself: it wants just these numbers, and each part would draw them again.
    """

    _IDENTITIES = {
        functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout,
        torch.feature_dropout, torch.feature_alpha_dropout,
    }  # fmt: skip
    _DRAWS: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        torch.randn: torch.zeros, torch.randn_like: torch.zeros_like,
        torch.rand: torch.zeros, torch.rand_like: torch.zeros_like,
    }  # fmt: skip

    def __init__(self, generators: Sequence[Any], number: float) -> None:
        """
        Args:
            generators: The module's own.
            number: What a single random number is, that all samples share.
        """
        super().__init__()
        self._number = number
        self.drew_number = False
        """Whether there was such a number."""
        self._generators = [(generator, generator_state(generator)) for generator in generators]
        self._shared = RandomState.capture()
        self._strange: dict[int, tuple[torch.Generator, Tensor]] = {}
        """Generators that the step has brought or seeded, with the states before they were drawn from."""
        self.ignored_labels: set[int] = set()
        """Labels that means over labels did not count."""
        self._kept: dict[int, tuple[nn.Parameter, Tensor, Tensor, bool]] = {}
        """Parameters that the step could write to: with their memory, what was in it, and whether they are trained."""
        self._viewed: dict[int, nn.Parameter] = {}
        """Parameters on files of which views were taken, by address: they are copied only if these are written to."""
        self._first = self._samples = self._draws = 0

    def begin(self, samples: int) -> None:
        """The next samples of the batch come."""
        self._first += self._samples
        self._samples = samples
        self._draws = 0

    def written_parameters(self) -> list[nn.Parameter]:
        """Those that are not what they were."""
        return [p for p, _, value, _ in self._kept.values() if not torch.equal(p.detach(), value)]

    def drew(self) -> bool:
        """Whether any generator has gone on: numbers were drawn that the samples at hand do not determine."""
        return (
            not RandomState.capture().same(self._shared)
            or any(generator_state(generator) != state for generator, state in self._generators)
            or any(not torch.equal(generator.get_state(), state) for generator, state in self._strange.values())
        )

    def put_back(self) -> None:
        """Undoes what was written to parameters."""
        for parameter, memory, value, trained in self._kept.values():
            memory.copy_(value)
            parameter.data = memory
            parameter.requires_grad_(trained)
        self._kept = {}
        for generator, state in self._strange.values():
            generator.set_state(state)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        generator = kwargs.get("generator") or torch.default_generator
        if generator.initial_seed() != _SEED:
            self._strange.setdefault(id(generator), (generator, generator.get_state()))
        elif func in self._IDENTITIES:
            return args[0] if args else kwargs["input"]
        elif (constant := self._DRAWS.get(func)) is not None:
            kwargs.pop("generator", None)
            return self._drawn(constant(*args, **kwargs), torch.randn if name.startswith("randn") else torch.rand)
        elif name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_"):
            if isinstance(args[0], nn.Parameter):
                self._keep(args[:1])
            return self._drawn(args[0].zero_(), torch.randn if name == "normal_" else torch.rand)
        elif func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *args[5:]) if len(args) > 4 else args, {**kwargs, "dropout_p": 0.0}
            if len(args) > 4:
                kwargs["is_causal"] = args[4]
                args = args[:4]
        elif func is functional.multi_head_attention_forward:
            args, kwargs = _without_training(args, kwargs)
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) > 5:
            position = 5 if isinstance(args[4], int) and not isinstance(args[4], bool) else 6
            args = (*args[:position], 0.0, *args[position + 1 :])
        if func in (functional.cross_entropy, functional.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            self.ignored_labels.add(kwargs.get("ignore_index", IGNORED_LABEL))
        given = [item for item in _flat((*args, *kwargs.values())) if isinstance(item, Tensor)]
        parameters: list[Any] = [item for item in given if isinstance(item, nn.Parameter)]
        viewed = [self._viewed[at] for item in given if (at := _address(item)) in self._viewed] if self._viewed else []
        if not parameters and not viewed:
            return func(*args, **kwargs)
        written = name in _HANDING_OUT or name in ("__set__", "__setitem__") or name.startswith("__i")
        written |= any(value is not None and value is not False for key, value in kwargs.items() if key in _WRITING)
        if written or (name.endswith("_") and not name.endswith("__")):
            self._keep([*parameters, *viewed])
        result = func(*args, **kwargs)
        memory = {_address(item) for item in _flat((result,)) if isinstance(item, Tensor)}
        for parameter in parameters:
            if (address := _address(parameter)) in memory:
                if not parameter.requires_grad and is_on_file(parameter):
                    self._viewed[address] = parameter
                else:
                    self._keep([parameter])
        return result

    def _keep(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._kept:
                memory = parameter.data
                self._kept[id(parameter)] = (parameter, memory, memory.clone(), parameter.requires_grad)

    def _drawn(self, zeros: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        """What the samples at hand draw; zeros where it is not known which they are."""
        self._draws += 1
        samples = self._samples
        if not zeros.is_floating_point():
            return zeros
        if zeros.ndim == 0 or (zeros.numel() == 1 and samples != 1):
            self.drew_number = True
            zeros.detach().fill_(self._number)
            return zeros
        if not samples or zeros.size(0) % samples:
            return zeros
        each = zeros.size(0) // samples
        for sample in range(samples):
            generator = torch.Generator().manual_seed(1_000_003 * self._draws + self._first + sample)
            rows = draw((each, *zeros.shape[1:]), generator=generator)
            zeros.detach()[sample * each : (sample + 1) * each] = rows.to(zeros.device, zeros.dtype)
        return zeros


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) in (list, tuple):
            yield from _flat(item)
        else:
            yield item


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _without_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``training`` is the 14th argument of ``multi_head_attention_forward``; here it means dropout only."""
    if len(args) > 13:
        return (*args[:13], False, *args[14:]), kwargs
    return args, {**kwargs, "training": False}
