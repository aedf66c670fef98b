"""Worker side: embeddings of images and other media, computed in slices and stored."""
