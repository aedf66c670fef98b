# SPDX-License-Identifier: Apache-2.0
"""Simulation of the engine: the real scheduler and KV cache in virtual time, with the step costs of a machine."""
