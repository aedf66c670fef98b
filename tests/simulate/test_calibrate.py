# SPDX-License-Identifier: Apache-2.0
"""Calibration: which frames and which times of a recorded run count."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quire.engine.trace import Added
from quire.simulate.calibrate import Answer, front_end_s, trace_from
from quire.simulate.load import SimulatedRequest
from tests.simulate.machines import RecordingSimulator, make_machine


def test_time_outside_the_core_is_that_of_lone_requests() -> None:
    machine = make_machine()
    simulator = RecordingSimulator(machine.config, machine)
    load = [SimulatedRequest(float(second), [second] * 8, 3) for second in range(3)]
    times = simulator.run(load).requests
    for place, frame in enumerate(simulator.frames):
        if isinstance(frame, Added):
            named = replace(frame.request, request_id=f"{frame.request.request_id}-suffix")
            simulator.frames[place] = replace(frame, request=named)
    answers = [
        Answer(str(name), one.arrival_s - 0.2, one.first_s + 0.3 * (1 + name), is_alone=name < 2)
        for name, one in enumerate(times)
    ]
    assert front_end_s(simulator.trace, answers) == pytest.approx(0.2 + 0.3 * 1.5)
    later = trace_from(simulator.trace, 1.0)
    assert len(later.frames) < len(simulator.frames)
    assert front_end_s(later, answers[1:]) == pytest.approx(0.2 + 0.3 * 2)
