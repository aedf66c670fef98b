# SPDX-License-Identifier: Apache-2.0
"""Many models behind one address: a process without torch in front of one server per model (docs/many_models.md)."""
