"""Train models larger than a GPU's memory from an unmodified LightningModule.

Importing the package registers ``strategy="roundpipe"`` and ``strategy="roundpipe_async"``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_roundpipe.microbatch import UnsplittableBatchError
from lightning_roundpipe.monitor import PipelineMonitor
from lightning_roundpipe.pipeline.escapes import RecomputeError
from lightning_roundpipe.strategy import RoundPipeStrategy
from lightning_roundpipe.timeline import Timeline
from lightning_roundpipe.verification import Verification
from lightning_roundpipe.verify import verify

__version__ = "0.1.0"
__all__ = [
    "PipelineMonitor",
    "RecomputeError",
    "RoundPipeStrategy",
    "Timeline",
    "UnsplittableBatchError",
    "Verification",
    "verify",
]

RoundPipeStrategy.register_strategies(StrategyRegistry)
