"""Processors of images: pixels to what an image encoder takes, with numpy and Pillow."""
