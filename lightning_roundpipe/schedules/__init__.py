"""Schedules as plain data: who runs what, where, in which order. Nothing here knows torch."""

from lightning_roundpipe.schedules.partition import Partition, balance
from lightning_roundpipe.schedules.roundpipe import roundpipe
from lightning_roundpipe.schedules.schedule import Action, Schedule

__all__ = ["Action", "Partition", "Schedule", "balance", "roundpipe"]
