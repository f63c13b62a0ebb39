"""Executes instruction lists: executors, communicators, accounting of memory. Knows nothing of models."""

from shardc.runtime.accounting import MemoryProfile, Stats, Tracker
from shardc.runtime.comm import Communicator, Move, NullCommunicator, Request, Start, Wait, drive
from shardc.runtime.executor import Executor, Outcome, Stream
from shardc.runtime.simulate import SimulatedCommunicator, dry_run, execution, simulate

__all__ = [
    "Communicator", "Executor", "MemoryProfile", "Move", "NullCommunicator", "Outcome", "Request", "SimulatedCommunicator",
    "Start", "Stats", "Stream", "Tracker", "Wait", "drive", "dry_run", "execution", "simulate",
]  # fmt: skip
