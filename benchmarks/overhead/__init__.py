"""Cost of serving besides the model: `python -m benchmarks.overhead`."""
