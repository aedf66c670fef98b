"""Models: reading checkpoints and building networks; importing this package loads no torch."""
