# SPDX-License-Identifier: Apache-2.0
"""Profiles of the worker's steps, started and stopped by routes and by `LLM.start_profile`."""
