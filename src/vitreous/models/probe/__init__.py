"""Linear probes: training them and attaching them to a backbone."""
