"""What ranks compare before they begin, so that two that would not compute the same model never do."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.distributed.agreement import check_same, check_same_word
from quire.distributed.group import Group
from quire.kernels.cpu.instruction_sets import VARIABLE, arithmetic
from quire.models.facts import model_of, options_of
from quire.version import __version__


def check_ranks_agree(group: Group, config: EngineConfig) -> None:
    """Every rank must be of the same version, configuration and checkpoint, and compute with the same instructions.

    Each samples by itself, from logits of which some sums are its own, so what rounds otherwise may say otherwise.

    Raises:
        StartupError: names the option, or whatever it is, and the ranks that have another than rank 0; of instructions,
            which each has.
    """
    check_same(group, {"version of quire": __version__.encode()})  # each says what there is to compare next
    check_same(group, options_of(config))
    check_same(group, model_of(config))
    if config.device.device == "cpu":
        advice = (
            f"{VARIABLE} set to one that all processors run, and kernels on all hosts, make them the same"
        )
        check_same_word(group, "instruction set", arithmetic(), advice)
