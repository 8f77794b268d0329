"""The planner: the memory and time of layouts on any cluster, and a search for the best. It imports no torch."""
