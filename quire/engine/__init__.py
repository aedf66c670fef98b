# SPDX-License-Identifier: Apache-2.0
"""Engine: front end (input, output, clients) and core (the step loop)."""
