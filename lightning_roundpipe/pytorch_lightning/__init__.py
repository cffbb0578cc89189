"""The same for people who ``import pytorch_lightning as pl``.

``pytorch_lightning`` and ``lightning.pytorch`` are the same files under two names, so each has classes and registries
of its own, and knows nothing of the other's. Here it is likewise: those of our modules that know Lightning exist a
second time, made from the same files with the other names in their imports. All others are shared.

Importing this package registers ``strategy="roundpipe"`` and ``strategy="roundpipe_async"`` with ``pytorch_lightning``.
"""

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

import pytorch_lightning.callbacks
import pytorch_lightning.strategies
from packaging.version import Version

from lightning_roundpipe.microbatch import UnsplittableBatchError
from lightning_roundpipe.pipeline.escapes import RecomputeError
from lightning_roundpipe.timeline import Timeline
from lightning_roundpipe.verification import Verification

__all__ = [
    "PipelineMonitor",
    "RecomputeError",
    "RoundPipeStrategy",
    "Timeline",
    "UnsplittableBatchError",
    "Verification",
    "verify",
]

if Version(pytorch_lightning.__version__) < Version("2.6"):
    raise ImportError(f"pytorch_lightning 2.6 or newer is needed, and {pytorch_lightning.__version__} is installed.")

_FOLDER = Path(__file__).parents[1]
_OTHER_NAMES = {r"\blightning\.pytorch\b": "pytorch_lightning", r"\blightning\.fabric\b": "lightning_fabric"}


@cache
def _made_twice() -> frozenset[str]:
    """The modules that import Lightning, or another one that does."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in _FOLDER.glob("[!_]*.py")}
    imported = {
        name: set(re.findall(r"^\s*from (lightning(?:_roundpipe)?\.\w+)", source, re.MULTILINE))
        | set(re.findall(r"^\s*import (lightning\.\w+)", source, re.MULTILINE))
        for name, source in sources.items()
    }
    found: set[str] = set()
    known = {"lightning.pytorch", "lightning.fabric"}
    while more := {name for name in imported if name not in found and known & imported[name]}:
        found |= more
        known |= {f"lightning_roundpipe.{name}" for name in more}
    return frozenset(found)


class _Loader(SourceFileLoader):
    """Loads one of our files under the other name, with the other names in it."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode("utf-8")
        ours = rf"\blightning_roundpipe\.({'|'.join(_made_twice())})\b"
        for name, other in {**_OTHER_NAMES, ours: rf"{__name__}.\1"}.items():
            source = re.sub(name, other, source)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in _made_twice():
            return None
        file = str(_FOLDER / f"{name}.py")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


sys.meta_path.append(_Finder())

if TYPE_CHECKING:
    from lightning_roundpipe.monitor import PipelineMonitor as _PipelineMonitor
    from lightning_roundpipe.strategy import RoundPipeStrategy as _RoundPipeStrategy
    from lightning_roundpipe.verify import verify

    class PipelineMonitor(_PipelineMonitor, pytorch_lightning.callbacks.Callback):  # type: ignore[misc]
        """As type checkers see it: fit for the other Trainer."""

    class RoundPipeStrategy(_RoundPipeStrategy, pytorch_lightning.strategies.Strategy):  # type: ignore[misc]
        """As type checkers see it: fit for the other Trainer."""

else:
    from lightning_roundpipe.pytorch_lightning.monitor import PipelineMonitor
    from lightning_roundpipe.pytorch_lightning.strategy import RoundPipeStrategy
    from lightning_roundpipe.pytorch_lightning.verify import verify

    RoundPipeStrategy.register_strategies(pytorch_lightning.strategies.StrategyRegistry)
