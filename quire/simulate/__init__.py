"""Simulation of the engine: the real scheduler and KV cache in virtual time, with the step costs of a machine."""
