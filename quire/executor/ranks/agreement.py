# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks on version, configuration, checkpoint and arithmetic before they start."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.distributed.group import Group, check_same, check_same_word
from quire.kernels.cpu.instruction_sets import VARIABLE, arithmetic
from quire.models.identity import model_of, options_of
from quire.version import __version__


def check_ranks_agree(group: Group, config: EngineConfig) -> None:
    """Check that every rank has the same version, configuration and checkpoint, and the same instruction set.

    Each rank samples by itself, from logits that include its own partial sums, so different rounding could give
    different tokens.

    Raises:
        StartupError: names the difference and the ranks that differ from rank 0; for instructions, every rank's set.
    """
    check_same(group, {"version of quire": __version__.encode()})  # first: it defines what is compared next
    check_same(group, options_of(config))
    check_same(group, model_of(config))
    if config.device.device == "cpu":
        advice = (
            f"set {VARIABLE} to an instruction set of all processors, and install the kernels on all hosts"
        )
        check_same_word(group, "instruction set", arithmetic(), advice)
