# SPDX-License-Identifier: Apache-2.0
from tests.entrypoints.openai.conftest import _no_key_from_environment as _no_key_from_environment
from tests.entrypoints.openai.conftest import client as client
from tests.entrypoints.openai.conftest import engine as engine
