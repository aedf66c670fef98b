# SPDX-License-Identifier: Apache-2.0
"""Executors: they run the workers, in this process or in others."""
