"""Several API processes on one port in front of one engine."""
