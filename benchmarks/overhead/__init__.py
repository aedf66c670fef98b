"""What serving costs besides the model: `python -m benchmarks.overhead`."""
