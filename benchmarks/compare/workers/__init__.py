# SPDX-License-Identifier: Apache-2.0
"""One program per engine, run in that engine's environment: loads the model, measures the cases, prints the rates."""
