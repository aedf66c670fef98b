# SPDX-License-Identifier: Apache-2.0
"""Processors of images: pixels to what an image encoder takes, with numpy and Pillow."""
