"""Engine: front end (input, output, clients) and core (the step loop)."""
