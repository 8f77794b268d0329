"""The self-test of an installation: a list of real runs with what must come of each, for any machine."""
