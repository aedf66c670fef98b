# SPDX-License-Identifier: Apache-2.0
"""A Llama whose logits are divided by a temperature that its config.json names."""
