"""Passes are verified in every test."""

from __future__ import annotations

import os

os.environ["SHARDC_VERIFY"] = "1"
