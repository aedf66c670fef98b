# SPDX-License-Identifier: Apache-2.0
from tests.engine.conftest import null_model_dir as null_model_dir
