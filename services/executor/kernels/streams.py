"""Whether a device computes beside the host."""

from __future__ import annotations

import torch


def on_gpu(device: torch.device) -> bool:
    """Say whether what a device is told runs later, in streams: then host memory that it reads is pinned, and kept."""
    return device.type == "cuda"
