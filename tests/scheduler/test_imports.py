# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest


@pytest.mark.item(60)
@pytest.mark.parametrize(
    "module",
    ["quire.scheduler.scheduler", "quire.kv_cache.manager", "quire.scheduler.output", "quire.executor.null"],
)
def test_the_control_plane_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit(any(m.split('.')[0] in ('torch', 'transformers') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
