# SPDX-License-Identifier: Apache-2.0
"""Worker side: embeddings of images and other media, computed in slices and stored."""
