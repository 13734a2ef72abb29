"""Where a rank of the learner computes."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from common.ranks import given_local_rank


def check_device(word: str) -> None:
    """Refuse `cuda` where there is none. Takes no GPU: whoever asks need not be the one who computes.

    Raises:
        ConfigError: torch sees no GPU on this machine.
    """
    if word == "cuda" and not torch.cuda.is_available():
        build = "was built with CUDA" if torch.version.cuda else "was built without CUDA"
        raise ConfigError(
            f"learner.backend.device must be cpu or auto, got cuda: torch sees no GPU on this machine (torch "
            f"{torch.__version__} {build})"
        )


def choose_device(word: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as the device of this rank, from now on the current one. Raises as above."""
    check_device(word)
    if word == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", given_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
