"""From a train step to a functional program: one trace over a fake twin of everything the step can reach."""

from shardc.capture.effects import Created, Effects
from shardc.capture.results import Tree, rebuild
from shardc.capture.trace import Captured, capture
from shardc.capture.world import SlotRef, World, observe, why

__all__ = ["Captured", "Created", "Effects", "SlotRef", "Tree", "World", "capture", "observe", "rebuild", "why"]
