"""The trackers: one module each, found by its name, which is the value of the key `tracking`."""
