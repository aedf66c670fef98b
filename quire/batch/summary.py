# SPDX-License-Identifier: Apache-2.0
"""Numbers of a finished run, as its last line and as its exit code; the command line imports them alone."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_ERRORS = 3  # Exit code of a run that answered everything, some of it with an error.


@dataclass
class RunCounts:
    """Inputs of a run: answered, answered with an error (of any run), and skipped because an earlier run answered."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0

    def sentence(self, unit: str, seconds: float, place: str) -> str:
        """Return the summary for a person.

        Args:
            unit: name of the inputs, in the plural.
            seconds: time of the run.
            place: name of the output.
        """
        before = f", {self.num_skipped} were answered before" if self.num_skipped else ""
        failed = f"; {self.num_failed} have errors: --retry-failed asks them again" if self.num_failed else ""
        return f"{self.num_answered} {unit} answered in {seconds:.0f} s{before}{failed}; answers: {place}"

    @property
    def exit_code(self) -> int:
        return EXIT_ERRORS if self.num_failed else 0
