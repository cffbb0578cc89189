"""Schedules as plain data: who runs what, where, in which order. Nothing here knows torch."""

from lightning_roundpipe.schedules.dualpipe import dualpipe
from lightning_roundpipe.schedules.gpipe import gpipe
from lightning_roundpipe.schedules.model_parallel import model_parallel
from lightning_roundpipe.schedules.one_f_one_b import interleaved, one_f_one_b
from lightning_roundpipe.schedules.partition import Partition, balance, bound
from lightning_roundpipe.schedules.roundpipe import roundpipe
from lightning_roundpipe.schedules.schedule import Action, Schedule
from lightning_roundpipe.schedules.sequential import sequential
from lightning_roundpipe.schedules.zero_bubble import zb1p

__all__ = [
    "Action",
    "Partition",
    "Schedule",
    "balance",
    "bound",
    "dualpipe",
    "gpipe",
    "interleaved",
    "model_parallel",
    "one_f_one_b",
    "roundpipe",
    "sequential",
    "zb1p",
]
