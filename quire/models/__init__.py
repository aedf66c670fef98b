# SPDX-License-Identifier: Apache-2.0
"""Models: reading checkpoints and building networks; importing this package loads no torch."""
