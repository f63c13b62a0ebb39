"""Cost models: devices and links, time of operators and collectives."""

from shardc.cost.devices import PROFILES, DeviceProfile, profile_of
from shardc.cost.model import collective_seconds, compute_seconds
from shardc.cost.work import flops

__all__ = ["PROFILES", "DeviceProfile", "collective_seconds", "compute_seconds", "flops", "profile_of"]
