"""From a train step to a functional program: one trace over a fake twin of everything the step can reach."""

from shardc.capture.captured import Captured
from shardc.capture.compare import InputsChanged
from shardc.capture.effects import Created, Effects
from shardc.capture.loss_scale import OVERFLOW, Scaled
from shardc.capture.results import Tree, rebuild
from shardc.capture.trace import Decide, capture
from shardc.capture.walk import observe
from shardc.capture.world import SlotRef, World, why

__all__ = [
    "OVERFLOW",
    "Captured",
    "Created",
    "Decide",
    "Effects",
    "InputsChanged",
    "Scaled",
    "SlotRef",
    "Tree",
    "World",
    "capture",
    "observe",
    "rebuild",
    "why",
]
