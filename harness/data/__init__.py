"""The text that runs train on."""
