"""Plans: instruction lists with everything that can be known about them before they run."""

from shardc.plan.communication import Communication, CommunicationRow
from shardc.plan.memory import Memory, Moment, PeakAt
from shardc.plan.plan import Plan, build
from shardc.plan.replicated import Replicated
from shardc.plan.timing import Time

__all__ = ["Communication", "CommunicationRow", "Memory", "Moment", "PeakAt", "Plan", "Replicated", "Time", "build"]
